"""Processes of a run that read a stream tell the one that prepares it which window they want, by a file for each.

readers/NAME         the number of the window; locked by the kernel for as long as the process lives
readers/NAME.error   why that window cannot be had
"""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from finetune.errors import DataError
from finetune.runtime.files import write_text
from finetune.runtime.terminal import readable

NOTHING = -1
_DIGITS = 12
_ERROR = ".error"


class Reader:
    """The place of this process among those that read, until it ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError where the file system has no locks."""
        name = f"{platform.node()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._path = folder / name
        hidden = folder / f".{name}"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by children, as `flock` is
        except OSError as error:
            raise DataError(f"{folder} cannot hold locks ({error}). Set data.cache_folder to a local disk.") from error
        self.want(NOTHING)
        hidden.rename(self._path)  # only now does anybody look whether it is locked

    def want(self, window: int) -> None:
        """Ask for a window and those after it; what is asked for last counts."""
        os.pwrite(self._file, f"{window:{_DIGITS}d}".encode(), 0)
        os.fsync(self._file)  # so that another machine on the same file system sees it

    def close(self) -> None:
        """Be no reader any more."""
        os.close(self._file)

    def raise_error(self) -> None:
        """Raise DataError when the window that is wanted cannot be had."""
        path = self._path.with_name(self._path.name + _ERROR)
        with suppress(FileNotFoundError):
            raise DataError(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Wish:
    """What a process that lives wants."""

    path: Path
    window: int

    def answer(self, error: str) -> None:
        """Tell the process why it cannot have the window."""
        path = self.path.with_name(self.path.name + _ERROR)
        if not path.exists():
            write_text(path, readable(error))


def wishes(folder: Path) -> Iterator[Wish]:
    """Yield what every reader that lives wants; the files of those that have ended are deleted.

    Not for a process that is a reader itself: its own lock would not outlast it.
    """
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix != _ERROR and (window := _wanted(path)) is not None:
            yield Wish(path, window)


def _wanted(path: Path) -> int | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return int(os.pread(file, _DIGITS, 0))
    finally:
        os.close(file)
    for gone in (path, path.with_name(path.name + _ERROR)):
        gone.unlink(missing_ok=True)
    return None
