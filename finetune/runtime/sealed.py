"""JSON that carries a digest of itself, and folders that carry one of each file: what has changed since is found.

The digests guard against damage (a flipped bit, a torn write, a lost file), not against somebody who can write here:
who changes a file can write its digest anew.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from finetune.runtime.files import write_json
from finetune.runtime.json_files import read_json
from finetune.runtime.redact import redacted_config
from finetune.runtime.regular import NotAFile, require_regular

SEAL = "seal.json"
_DIGEST = "digest"


class Damaged(ValueError):
    """What is on disk is not what was written."""


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value with its digest."""
    return {**value, _DIGEST: _digest_of(value)}


def opened(value: Any) -> dict[str, Any]:
    """Return what `sealed` was given; raises Damaged where it is something else."""
    if not isinstance(value, dict) or _DIGEST not in value:
        raise Damaged("it has no digest of itself")
    content = {name: each for name, each in value.items() if name != _DIGEST}
    if value[_DIGEST] != _digest_of(content):
        raise Damaged("it does not fit its own digest")
    return content


def write_sealed(path: Path, value: Mapping[str, Any], *, exact: bool = False) -> None:
    """Write the value with its digest, whole or not at all, and without secrets (`exact`: see `write_json`)."""
    write_json(path, sealed(value if exact else redacted_config(value)), exact=True)


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what `write_sealed` has written; raises Damaged for anything else."""
    try:
        return opened(read_json(path))
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name} cannot be trusted: {error}") from error


def require_file(path: Path) -> None:
    """Raise Damaged unless the path is a file or leads to one: a pipe or a device would never end."""
    try:
        require_regular(path)
    except NotAFile as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error


def seal_folder(folder: Path) -> None:
    """Write a digest of every file in the folder into it."""
    write_sealed(folder / SEAL, {"files": _digests(folder)})


def folder_damage(folder: Path) -> str | None:
    """Return what is not as `seal_folder` has left it; None where all is."""
    try:
        files = read_sealed(folder / SEAL).get("files")
        now = _digests(folder)
    except (OSError, ValueError) as error:
        return str(error)
    if not isinstance(files, dict):
        return f"{SEAL} names no files"
    other = sorted(name for name in {*files, *now} if files.get(name) != now.get(name))
    return f"{', '.join(other)}: not as written" if other else None


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.name != SEAL and not path.is_dir())
    for path in paths:
        require_file(path)
    return {path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}


def _digest_of(value: Mapping[str, Any]) -> str:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(written.encode("utf-8", "surrogatepass"))
