"""Digests of files; those of large files are remembered until the file system says that something was written."""

import hashlib
import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from finetune.runtime.files import write_json

FOLDER = "~/.cache/finetune/digests"
LARGE_BYTES = 64 << 20
_SETTLED_SECONDS = 2.0  # a file written so lately might be written again within one tick of the file system's clock


def file_digest(path: Path) -> str:
    """Return a digest of the file's content; a large file that was not written since is not read again.

    What is remembered counts only for the same inode, size and times, the time of the last change of its state
    (ctime) among them, which no program can set back.
    """
    state = _state(path)
    if state["size"] < LARGE_BYTES:
        return _read(path)
    note = _note(path)
    with suppress(OSError, ValueError, KeyError):
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["state"] == state:
            return str(known["digest"])
    digest = _read(path)
    if _state(path) == state and time.time() - state["changed"] / 1e9 > _SETTLED_SECONDS:
        with suppress(OSError):  # remembering is a convenience
            write_json(note, {"path": str(path), "state": state, "digest": digest})
    return digest


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "written": found.st_mtime_ns,
        "changed": found.st_ctime_ns,
    }


def _note(path: Path) -> Path:
    name = hashlib.blake2b(str(path.resolve()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return Path(FOLDER).expanduser() / f"{name}.json"


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()
