"""Files that appear whole or not at all, and folders that one process makes while the others wait."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from finetune.runtime.json_files import parse_json, read_regular
from finetune.runtime.leftovers import temporary
from finetune.runtime.redact import redacted_config
from finetune.runtime.terminal import json_text


def write_text(path: Path, text: str) -> None:
    """Write the file so that a reader sees all of it or what was there before; survives a power cut."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes, *, survives_power_cut: bool = True) -> None:
    """Write the file likewise; what can be made again need not survive a power cut, which is much faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary(path)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if survives_power_cut:
                file.flush()
                os.fsync(file.fileno())
        staging.chmod(0o644)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    if survives_power_cut:
        sync(path.parent)


def write_json(path: Path, value: Any, *, exact: bool = False) -> None:
    """Write `value` as indented JSON, whole or not at all, and without secrets.

    `exact` is for what is read back and compared or counted on: nothing is looked for in it, so nobody may have written
    a secret there.
    """
    write_text(path, json_text(value if exact else redacted_config(value), indent=2) + "\n")


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line; one that was torn by a killed process, or is damaged, is left out."""
    for line in read_regular(path).decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            yield parse_json(line)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def say_nothing(staging: Path) -> None:
    """Say nothing."""


def make_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    say: Callable[[str], None],
    goes_on: bool = False,
    while_waiting: Callable[[Path], None] = say_nothing,
) -> bool:
    """Make `folder` by calling `build(staging)` in exactly one process; return whether this one built it.

    Others on the same file system wait on a lock file and say so; `while_waiting(staging)` is called every second. When
    the builder dies, one of them takes over. What an unfinished build leaves in its staging folder is removed, unless
    the build `goes_on` from it. No collective: safe before process groups exist.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.making")
    with _held(folder.with_name(f".{folder.name}.lock"), say=say, what=folder, wait=lambda: while_waiting(staging)):
        if folder.exists():
            return False
        if os.path.lexists(folder):
            _rename_aside(folder)  # a link that leads nowhere
        try:
            if not goes_on or not _is_folder(staging):
                _remove(staging)
            staging.mkdir(exist_ok=True)
            build(staging)
            staging.replace(folder)
        finally:
            if not goes_on:
                shutil.rmtree(staging, ignore_errors=True)
        sync(folder.parent)
        return True


def set_aside(folder: Path, is_damaged: Callable[[], bool], *, say: Callable[[str], None]) -> Path | None:
    """Rename a damaged folder that `make_once` has made, and return what it is called now.

    It is looked at again while no other process makes or renames it; None where it is not damaged then, or not there.
    Raises OSError where it cannot be renamed.
    """
    with _held(folder.with_name(f".{folder.name}.lock"), say=say, what=folder, wait=lambda: None):
        if not os.path.lexists(folder) or not is_damaged():
            return None
        return _rename_aside(folder)


def _rename_aside(path: Path) -> Path:
    numbered = (path.with_name(f".damaged-{path.name}-{number}") for number in count(1))
    aside = next(each for each in numbered if not os.path.lexists(each))
    path.rename(aside)
    return aside


def _is_folder(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode)


def _remove(path: Path) -> None:
    """Remove what is there, be it a folder, a file or a link."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _held(path: Path, *, say: Callable[[str], None], what: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock, which the kernel takes from a process that dies; call `wait` every second until it is free."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that makes {what}")
        while not lock.is_locked:
            wait()
            with suppress(Timeout):
                lock.acquire(timeout=1.0)
    try:
        yield
    finally:
        lock.release()
