"""One writer per run folder."""

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.json_files import parse_json
from finetune.runtime.run_folder import require_plain_names

LOCK = ".writer.lock"


@contextmanager
def claimed(folder: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder, which is made, while the context lasts; raises UserError that names who holds it.

    Also raises UserError where it cannot be made or written, or where something else has the name of one of its files.

    The lock is the kernel's: it goes with the process that holds it, however that ends, and is not inherited by the
    processes it starts (hence `lockf`; `flock` is). Where the file system has no locks, that is said.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_plain_names(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise UserError(f"run.folder: {_why(folder, error)} Write another run.folder, or mend this one.") from error
    try:
        _lock(descriptor, folder, say=say)
        yield
    finally:
        os.close(descriptor)  # lets go of the lock


def _lock(descriptor: int, folder: Path, *, say: Callable[[str], None]) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(_refusal(descriptor, folder)) from None
    except OSError as error:
        say(f"warning: {folder} cannot be locked against a second run ({error}); make sure that there is none.")
        return
    me = {"host": platform.node(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    with suppress(OSError):  # on a full disk the name of the holder is missing, and the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode(), 0)


def _why(folder: Path, error: OSError) -> str:
    blocking = next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)
    if blocking is not None:
        return f"{folder} cannot be made: {blocking} is no folder."
    return f"{folder} cannot be written: {error.strerror or error}."


def _refusal(descriptor: int, folder: Path) -> str:
    try:
        holder: dict[str, Any] = parse_json(os.pread(descriptor, 1000, 0))
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        who = "another process"
    return (
        f"run.folder: {folder} is being written by {who}. Wait until that run ends, end it with `touch {folder}/STOP`, "
        "or write another run.folder."
    )
