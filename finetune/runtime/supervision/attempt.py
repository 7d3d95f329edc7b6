"""The attempt of which a process is, where supervisors launch a run again and again: an older one writes no more.

A host that was suspended believes on its return that it holds the run folder, and the lock of a network file system
may have been taken from it meanwhile. So a supervisor marks an attempt before it starts its ranks, and ranks look for
a mark of a newer one before they make a checkpoint visible or delete one, and every second.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from finetune.errors import LostContact

_FOLDER, _NUMBER = "FINETUNE_ATTEMPT_FOLDER", "FINETUNE_ATTEMPT"
_MARK = "begun-"


def mark_attempt(folder: Path, number: int) -> dict[str, str]:
    """Have processes of earlier attempts write no more; return the environment of this one's. Raises OSError."""
    (folder / f"{_MARK}{number:06d}").touch()
    return {_FOLDER: str(folder), _NUMBER: str(number)}


def own_attempt(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of the attempt of which this process is; 0 without a supervisor."""
    return int(environment.get(_NUMBER, "0"))


def newer_attempt(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of an attempt that has begun after this process's, if one has."""
    if _FOLDER not in environment:
        return None
    names = (path.name.removeprefix(_MARK) for path in Path(environment[_FOLDER]).glob(f"{_MARK}*"))
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    return newest if newest > own_attempt(environment) else None


def require_newest_attempt() -> None:
    """Raise LostContact where a newer attempt has begun, on other hosts: this process must write no more."""
    if (newer := newer_attempt()) is not None:
        raise LostContact(format_newer(newer))


def format_newer(newer: int) -> str:
    """Return the message of a process that has been replaced."""
    return (
        f"attempt {newer} of the run has started without this host, which did not respond in time: this process, of "
        f"attempt {own_attempt()}, writes nothing more."
    )
