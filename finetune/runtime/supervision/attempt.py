"""The attempt of a process whose run is relaunched on other hosts: processes of older attempts stop writing.

A host that resumes after a suspension assumes that it still holds the run folder, but may have lost its lock on a
network file system. So an attempt is marked before its ranks start, and ranks look for a newer mark before they publish
or delete a checkpoint, and every second.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from finetune.errors import LostContact

_FOLDER, _NUMBER = "FINETUNE_ATTEMPT_FOLDER", "FINETUNE_ATTEMPT"
_MARK = "begun-"


def mark_of(folder: Path, number: int) -> Path:
    """Return the path of the mark of an attempt."""
    return folder / f"{_MARK}{number:06d}"


def mark_attempt(folder: Path, number: int) -> dict[str, str]:
    """Stop writes of earlier attempts; return the environment of this attempt's processes. Raises OSError."""
    mark_of(folder, number).touch()
    return {_FOLDER: str(folder), _NUMBER: str(number)}


def own_attempt(environment: Mapping[str, str] = os.environ) -> int:
    """Return the attempt of this process; 0 where none is marked."""
    return int(environment.get(_NUMBER, "0"))


def newer_attempt(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the newest attempt if it is newer than that of this process, else None."""
    if _FOLDER not in environment:
        return None
    names = (path.name.removeprefix(_MARK) for path in Path(environment[_FOLDER]).glob(f"{_MARK}*"))
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    return newest if newest > own_attempt(environment) else None


def is_replaced(environment: Mapping[str, str], folder: Path, number: int) -> bool:
    """Return whether a process with this environment belongs to an attempt of the folder before this one."""
    return environment.get(_FOLDER) == str(folder) and own_attempt(environment) < number


def require_newest_attempt() -> None:
    """Raise LostContact if a newer attempt has begun on other hosts, so that this process writes no more."""
    if (newer := newer_attempt()) is not None:
        raise LostContact(format_newer(newer))


def format_newer(newer: int) -> str:
    """Return the message of a process that has been replaced."""
    return (
        f"attempt {newer} of the run has started without this host, which did not respond in time: this process, of "
        f"attempt {own_attempt()}, writes nothing more."
    )
