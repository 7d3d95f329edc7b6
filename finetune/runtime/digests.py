"""Digests of files; those of large files are remembered until the file system says that something was written."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from finetune.runtime.files import write_json
from finetune.runtime.json_files import read_json

FOLDER = "~/.cache/finetune/digests"
LARGE_BYTES = 64 << 20
_SETTLED_SECONDS = 2.0  # a file written so lately might be written again within one tick of the file system's clock


def file_digest(path: Path) -> str:
    """Return a digest of the file's content; a large file that was not written since is not read again.

    What is remembered counts only for the same inode, size and times, the time of the last change of its state
    (ctime) among them, which no program can set back.
    """
    return _remembered([path], partial(_read, path), name=str(path.resolve()))


def sha256_digest(path: Path) -> str:
    """Return what `sha256sum` prints of the file; remembered likewise."""
    return _remembered([path], partial(_sha256, path), name=f"sha256 {path.resolve()}")


def files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the files' contents in this order; what is large together is remembered likewise.

    Raises OSError for a file that cannot be read.
    """
    return _remembered(paths, partial(_of_all, paths), name="\n".join(map(str, paths)))


def _remembered(paths: Sequence[Path], read: Callable[[], str], *, name: str) -> str:
    states = [_state(path) for path in paths]
    if sum(each["size"] for each in states) < LARGE_BYTES:
        return read()
    note = _note(name)
    state = hashlib.blake2b(json.dumps(states).encode(), digest_size=16).hexdigest()
    with suppress(OSError, ValueError):
        known = read_json(note)
        if isinstance(known, dict) and known.get("state") == state and isinstance(known.get("digest"), str):
            return str(known["digest"])
    digest = read()
    is_settled = time.time() - max(each["changed"] for each in states) / 1e9 > _SETTLED_SECONDS
    if is_settled and [_state(path) for path in paths] == states:
        with suppress(OSError):  # remembering is a convenience
            write_json(note, {"path": str(paths[0]), "state": state, "digest": digest}, exact=True)
    return digest


def _of_all(paths: Sequence[Path]) -> str:
    digests = "\n".join(map(_read, paths))
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "written": found.st_mtime_ns,
        "changed": found.st_ctime_ns,
    }


def _note(name: str) -> Path:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return Path(FOLDER).expanduser() / f"{digest}.json"


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()
