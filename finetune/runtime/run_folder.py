"""A run folder: the names in it, its lock for one writer at a time, and the attempt that may write.

The lock is taken after a check that the names of the run's files are free. A host that resumes after a suspension
assumes that it still holds the run folder, but may have lost its lock on a network file system. So where a run is
relaunched on other hosts, an attempt is marked before its ranks start, and ranks look for a newer mark before they
publish or delete a checkpoint, and every second.
"""

import fcntl
import json
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import LostContact, UserError
from finetune.runtime.files.read import FILE_TYPES, parse_json

CHECKPOINTS_FOLDER = "checkpoints"
FINAL_FOLDER = "final"
"""The exported model of a finished run."""

FAILED_FINAL_FOLDER = "final.failed"
"""An export that differed from the trained model, renamed."""

HANG_FOLDER = "hang"
"""The stacks of all ranks, written when a run hangs."""

INPUTS_FOLDER = "inputs"
"""Tokenizer, processor and label names, so that a checkpoint can be exported without the data."""

SAMPLES_FOLDER = "samples"
PROFILE_FOLDER = "profile"
"""The traces of all ranks, a folder for each window of steps."""

FOLDERS = (CHECKPOINTS_FOLDER, SAMPLES_FOLDER, INPUTS_FOLDER, FINAL_FOLDER, HANG_FOLDER, PROFILE_FOLDER)


LOCK = ".writer.lock"
FILES = (
    LOCK,
    ".status.lock",
    "STOP",
    "status.json",
    "events.jsonl",
    "config.yaml",
    "resolved.yaml",
    "environment.json",
    "audit.json",
    "final.json",
)

_FILE_TYPES = {**FILE_TYPES, stat.S_IFREG: "a file", stat.S_IFIFO: "a named pipe"}


def require_free_names(folder: Path) -> None:
    """Raise UserError if a name of a run's files or folders is taken by something of another type."""
    problems = []
    for names, expected_type in ((FILES, stat.S_IFREG), (FOLDERS, stat.S_IFDIR)):
        for path in (folder / name for name in names):
            try:
                file_type = stat.S_IFMT(path.stat().st_mode)
            except FileNotFoundError:
                if os.path.lexists(path):
                    problems.append(f"{path} is a broken link")
            except OSError as error:
                problems.append(f"{path} cannot be read ({error.strerror})")
            else:
                if file_type != expected_type:
                    actual = _FILE_TYPES.get(file_type, "of another type")
                    problems.append(f"{path} is {actual}, not {_FILE_TYPES[expected_type]}")
    if problems:
        raise UserError(f"run.folder: {'; '.join(problems)}. Move or delete it, or set another run.folder.")


_locked_here: set[Path] = set()
"""The run folders that this process writes to."""


@contextmanager
def lock_run_folder(folder: Path, *, log: Callable[[str], None]) -> Iterator[None]:
    """Create and lock the folder in this context; raises UserError that names the holder of the lock.

    Also raises UserError if it cannot be created or written, or if names of its files are taken.

    The kernel releases the lock when the process ends in any way, and child processes do not inherit it (unlike that of
    `flock`). A file system without locks is logged.
    """
    path = folder.resolve()
    if path in _locked_here:  # its own lock does not keep a process out, and opening the file again would release it
        raise UserError(
            f"run.folder: this process has a run or session open in {folder}. Close it, or set another one."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_free_names(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        blocking = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        problem = f"{folder} cannot be written: {error.strerror or error}."
        if blocking is not None:
            problem = f"{folder} cannot be created: {blocking} is not a folder."
        raise UserError(f"run.folder: {problem} Set another run.folder, or fix this one.") from error
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            me = {"host": platform.node(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
            with suppress(OSError):  # on a full disk the lock works without the name of its holder
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(me).encode(), 0)
        except (BlockingIOError, PermissionError):
            try:
                holder: dict[str, Any] = parse_json(os.pread(descriptor, 1000, 0))
                who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
            except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
                who = "another process"
            raise UserError(
                f"run.folder: {folder} is being written by {who}. Wait until that run ends, end it with "
                f"`touch {folder}/STOP`, or set another run.folder."
            ) from None
        except OSError as error:
            log(
                f"warning: {folder} cannot be locked against a second run ({error}). Make sure that no other run "
                "writes to it."
            )
        _locked_here.add(path)
        try:
            yield
        finally:
            _locked_here.discard(path)
    finally:
        os.close(descriptor)  # releases the lock


def is_locked(folder: Path) -> bool:
    """Return whether a process of this machine, or of one with the same file system, writes to the run folder now."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # without locks
        return False
    finally:
        os.close(descriptor)
    return False


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
