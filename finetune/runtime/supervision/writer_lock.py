"""The lock of a run folder, for one writer at a time.

It is taken after a check that the names of the run's files are free.
"""

import fcntl
import json
import os
import platform
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.files.read import parse_json
from finetune.runtime.run_folder import FOLDERS

FILES = (
    ".writer.lock",
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

_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_free_names(folder: Path) -> None:
    """Raise UserError if a name of a run's files or folders is taken by something of another type."""
    problems = [
        problem
        for names, file_type in ((FILES, stat.S_IFREG), (FOLDERS, stat.S_IFDIR))
        for name in names
        if (problem := _problem(folder / name, file_type)) is not None
    ]
    if problems:
        raise UserError(f"run.folder: {'; '.join(problems)}. Move or delete it, or set another run.folder.")


def _problem(path: Path, expected_type: int) -> str | None:
    try:
        file_type = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return f"{path} is a broken link" if os.path.lexists(path) else None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return (
        None
        if file_type == expected_type
        else f"{path} is {_FILE_TYPES.get(file_type, 'of another type')}, not {_FILE_TYPES[expected_type]}"
    )


LOCK = ".writer.lock"


@contextmanager
def lock_run_folder(folder: Path, *, log: Callable[[str], None]) -> Iterator[None]:
    """Create and lock the folder in this context; raises UserError that names the holder of the lock.

    Also raises UserError if it cannot be created or written, or if names of its files are taken.

    The kernel releases the lock when the process ends in any way, and child processes do not inherit it (unlike that of
    `flock`). A file system without locks is logged.
    """
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
        _lock(descriptor, folder, log=log)
        yield
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


def _lock(descriptor: int, folder: Path, *, log: Callable[[str], None]) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(_format_held_lock(descriptor, folder)) from None
    except OSError as error:
        log(
            f"warning: {folder} cannot be locked against a second run ({error}). Make sure that no other run writes "
            "to it."
        )
        return
    me = {"host": platform.node(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    with suppress(OSError):  # on a full disk the lock works without the name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode(), 0)


def _format_held_lock(descriptor: int, folder: Path) -> str:
    try:
        holder: dict[str, Any] = parse_json(os.pread(descriptor, 1000, 0))
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
        who = "another process"
    return (
        f"run.folder: {folder} is being written by {who}. Wait until that run ends, end it with `touch {folder}/STOP`, "
        "or set another run.folder."
    )
