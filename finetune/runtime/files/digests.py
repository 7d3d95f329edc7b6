"""Digests of files, JSON files that carry their own digest, and folders that carry one of each file.

Digests of large files are cached until the file system reports a change. Digests guard against damage (a flipped bit,
a torn write, a lost file), not against an attacker who can write here: who changes a file can rewrite its digest.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from finetune.errors import NotAFile
from finetune.runtime.files.atomic import write_json
from finetune.runtime.files.read import read_json, require_regular
from finetune.runtime.text.redact import redacted_config

CACHE_FOLDER = "~/.cache/finetune/digests"
LARGE_BYTES = 64 << 20
_MIN_AGE_SECONDS = 2.0  # a file written so lately might be written again within one tick of the file system's clock


def file_digest(path: Path) -> str:
    """Return a digest of the file's content; a large file that was not written since is not read again.

    What is remembered counts only for the same inode, size and times, the time of the last change of its state
    (ctime) among them, which no program can set back.
    """
    return _cached([path], partial(_read, path), name=str(path.resolve()))


def sha256_digest(path: Path) -> str:
    """Return what `sha256sum` prints of the file; remembered likewise."""
    return _cached([path], partial(_sha256, path), name=f"sha256 {path.resolve()}")


def files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the files' contents in this order; what is large together is remembered likewise.

    Raises OSError for a file that cannot be read.
    """
    return _cached(paths, partial(_of_all, paths), name="\n".join(map(str, paths)))


def _cached(paths: Sequence[Path], read: Callable[[], str], *, name: str) -> str:
    states = [_state(path) for path in paths]
    if sum(state["size"] for state in states) < LARGE_BYTES:
        return read()
    note = _cache_file(name)
    state = hashlib.blake2b(json.dumps(states).encode(), digest_size=16).hexdigest()
    with suppress(OSError, ValueError):
        known = read_json(note)
        if isinstance(known, dict) and known.get("state") == state and isinstance(known.get("digest"), str):
            return str(known["digest"])
    digest = read()
    is_old_enough = time.time() - max(state["changed"] for state in states) / 1e9 > _MIN_AGE_SECONDS
    if is_old_enough and [_state(path) for path in paths] == states:
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
    facts = path.stat()
    return {
        "device": facts.st_dev,
        "inode": facts.st_ino,
        "size": facts.st_size,
        "written": facts.st_mtime_ns,
        "changed": facts.st_ctime_ns,
    }


def _cache_file(name: str) -> Path:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return Path(CACHE_FOLDER).expanduser() / f"{digest}.json"


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()


DIGESTS_FILE = "digests.json"
_EARLIER_DIGESTS_FILE = "seal.json"
"""The name of the same file in folders that were written before December 2026."""

_DIGEST = "digest"


class Damaged(ValueError):
    """What is on disk is not what was written."""


def with_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value with its digest."""
    return {**value, _DIGEST: _digest_of(value)}


def check_digest(value: Any) -> dict[str, Any]:
    """Return the value that `with_digest` was given; raises Damaged where it has another digest."""
    if not isinstance(value, dict) or _DIGEST not in value:
        raise Damaged("it has no digest of itself")
    content = {name: content_value for name, content_value in value.items() if name != _DIGEST}
    if value[_DIGEST] != _digest_of(content):
        raise Damaged("it does not fit its own digest")
    return content


def write_json_with_digest(path: Path, value: Mapping[str, Any], *, exact: bool = False) -> None:
    """Write the value with its digest, whole or not at all, and without secrets (`exact`: see `write_json`)."""
    write_json(path, with_digest(value if exact else redacted_config(value)), exact=True)


def read_json_with_digest(path: Path) -> dict[str, Any]:
    """Return what `write_json_with_digest` has written; raises Damaged for anything else."""
    try:
        return check_digest(read_json(path))
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name} cannot be trusted: {error}") from error


def require_undamaged_file(path: Path) -> None:
    """Raise Damaged unless the path is a file or leads to one: a pipe or a device would never end."""
    try:
        require_regular(path)
    except NotAFile as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error


def write_folder_digests(folder: Path) -> None:
    """Write a digest of every file in the folder into it."""
    (folder / _EARLIER_DIGESTS_FILE).unlink(missing_ok=True)
    write_json_with_digest(folder / DIGESTS_FILE, {"files": _digests(folder)})


def digests_file(folder: Path) -> Path | None:
    """Return the file that holds the folder's digests, also that of an earlier version; None without one."""
    paths = (folder / DIGESTS_FILE, folder / _EARLIER_DIGESTS_FILE)
    return next((path for path in paths if path.is_file()), None)


def find_folder_damage(folder: Path) -> str | None:
    """Return the files that are not as their digests say, and why digests cannot be read; None where all is well."""
    digests = digests_file(folder) or folder / DIGESTS_FILE
    try:
        files = read_json_with_digest(digests).get("files")
        now = _digests(folder)
    except (OSError, ValueError) as error:
        return str(error)
    if not isinstance(files, dict):
        return f"{digests.name} names no files"
    other = sorted(name for name in {*files, *now} if files.get(name) != now.get(name))
    return f"{', '.join(other)}: not as written" if other else None


def _digests(folder: Path) -> dict[str, str]:
    names = (DIGESTS_FILE, _EARLIER_DIGESTS_FILE)
    paths = sorted(path for path in folder.rglob("*") if path.name not in names and not path.is_dir())
    for path in paths:
        require_undamaged_file(path)
    return {path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}


def _digest_of(value: Mapping[str, Any]) -> str:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(written.encode("utf-8", "surrogatepass"))
