"""Digests of files, JSON files with their own digest, and folders with a digest of each file.

Digests of large files are cached until the file system reports a change. Digests guard against damage (a flipped bit,
a torn write, a lost file), not against an attacker, who could also rewrite a digest.
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
from finetune.runtime.text.redact import redact_known_values

CACHE_FOLDER = "~/.cache/finetune/digests"
LARGE_BYTES = 64 << 20
_BLAKE2B = partial(hashlib.blake2b, digest_size=16)
_MIN_AGE_SECONDS = 2.0  # a newer file might be written again within one tick of the file system's clock


def file_digest(path: Path) -> str:
    """Return a digest of the file's content; the digest of a large, unchanged file is cached.

    A cached digest is valid only for the same inode, size and times, including the time of the last status change
    (ctime), which programs cannot set.
    """
    return _cached([path], lambda: _read(path), name=str(path.resolve()))


def sha256_digest(path: Path) -> str:
    """Return the SHA-256 digest of the file, cached in the same way."""
    return _cached([path], lambda: _read(path, algorithm="sha256"), name=f"sha256 {path.resolve()}")


def files_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the files' contents in this order; that of large files is cached in the same way."""
    return _cached(
        paths, lambda: _BLAKE2B("\n".join(map(_read, paths)).encode()).hexdigest(), name="\n".join(map(str, paths))
    )


def _cached(paths: Sequence[Path], read: Callable[[], str], *, name: str) -> str:
    states = [_state(path) for path in paths]
    if sum(size for _, _, size, _, _ in states) < LARGE_BYTES:
        return read()
    cache_digest = _BLAKE2B(name.encode("utf-8", "surrogateescape")).hexdigest()
    cache_file = Path(CACHE_FOLDER).expanduser() / f"{cache_digest}.json"
    state = _BLAKE2B(json.dumps(states).encode()).hexdigest()
    with suppress(OSError, ValueError):
        known = read_json(cache_file)
        if isinstance(known, dict) and known.get("state") == state and isinstance(known.get("digest"), str):
            return str(known["digest"])
    digest = read()
    is_old_enough = time.time() - max(changed for *_, changed in states) / 1e9 > _MIN_AGE_SECONDS
    if is_old_enough and [_state(path) for path in paths] == states:
        with suppress(OSError):  # the cache is optional
            write_json(cache_file, {"path": str(paths[0]), "state": state, "digest": digest}, exact=True)
    return digest


def _state(path: Path) -> tuple[int, ...]:
    """Return device, inode, size, and the times in nanoseconds when the file was written and changed."""
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _read(path: Path, *, algorithm: Any = _BLAKE2B) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


DIGESTS_FILE = "digests.json"
_DIGEST = "digest"


class Damaged(ValueError):
    """A file differs from its recorded digest."""


def with_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value with its digest."""
    return {**value, _DIGEST: _digest_of(value)}


def check_digest(value: Any) -> dict[str, Any]:
    """Return the value without its digest; raises Damaged if the digest does not match."""
    if not isinstance(value, dict) or _DIGEST not in value:
        raise Damaged("it has no digest")
    content = {name: content_value for name, content_value in value.items() if name != _DIGEST}
    if value[_DIGEST] != _digest_of(content):
        raise Damaged("it does not match its digest")
    return content


def write_json_with_digest(path: Path, value: Mapping[str, Any], *, exact: bool = False) -> None:
    """Write the value with its digest, whole or not at all, and without secrets (`exact`: see `write_json`)."""
    write_json(path, with_digest(value if exact else redact_known_values(value)), exact=True)


def read_json_with_digest(path: Path) -> dict[str, Any]:
    """Return the value of a file of `write_json_with_digest`; raises Damaged for anything else."""
    try:
        return check_digest(read_json(path))
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name} cannot be trusted: {error}") from error


def require_undamaged_file(path: Path) -> None:
    """Raise Damaged unless the path is a regular file or a link to one: reading a pipe could block."""
    try:
        require_regular(path)
    except NotAFile as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error


def write_folder_digests(folder: Path) -> None:
    """Write the digests of all files of the folder into it."""
    write_json_with_digest(folder / DIGESTS_FILE, {"files": _digests(folder)})


def find_folder_damage(folder: Path) -> str | None:
    """Return a message with the damaged files of the folder; None if all match their digests."""
    try:
        files = read_json_with_digest(folder / DIGESTS_FILE).get("files")
        now = _digests(folder)
    except (OSError, ValueError) as error:
        return str(error)
    if not isinstance(files, dict):
        return f"{DIGESTS_FILE} names no files"
    damaged = sorted(name for name in {*files, *now} if files.get(name) != now.get(name))
    return f"{', '.join(damaged)}: not as written" if damaged else None


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.name != DIGESTS_FILE and not path.is_dir())
    for path in paths:
        require_undamaged_file(path)
    return {path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}


def _digest_of(value: Mapping[str, Any]) -> str:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(written.encode("utf-8", "surrogatepass"))
