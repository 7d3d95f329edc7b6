"""A stream's folder in the cache: its windows, a small record of every window, and the readers' requests.

readers/NAME the number of the window; locked by the kernel for as long as the process lives readers/NAME.error why
that window cannot be prepared
"""

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from uuid import uuid4

import numpy as np
import xxhash

from finetune.data.order.stream_plan import Cursor
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import DamagedSet
from finetune.errors import DataError
from finetune.runtime.files.atomic import write_bytes, write_text
from finetune.runtime.files.digests import (
    Damaged,
    read_json_with_digest,
    require_undamaged_file,
    write_json_with_digest,
)
from finetune.runtime.text.terminal import printable

NOTHING = -1
_DIGITS = 12
_ERROR = ".error"


class StreamReader:
    """The registration of this process as a reader, until it ends, however it ends."""

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
        """Request a window and those after it; the last request counts."""
        os.pwrite(self._file, f"{window:{_DIGITS}d}".encode(), 0)
        os.fsync(self._file)  # so that another machine on the same file system sees it

    def close(self) -> None:
        """Stop being a reader."""
        os.close(self._file)

    def raise_error(self) -> None:
        """Raise DataError when the requested window cannot be prepared."""
        path = self._path.with_name(self._path.name + _ERROR)
        with suppress(FileNotFoundError):
            raise DataError(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class WindowRequest:
    """What a living process requests."""

    path: Path
    window: int

    def answer(self, error: str) -> None:
        """Answer the process with the reason why the window cannot be prepared."""
        path = self.path.with_name(self.path.name + _ERROR)
        if not path.exists():
            write_text(path, printable(error))


def window_requests(folder: Path) -> Iterator[WindowRequest]:
    """Yield the request of every living reader; the files of those that have ended are deleted.

    Not for a process that is a reader itself: its own lock would not outlast it.
    """
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix != _ERROR and (window := _wanted(path)) is not None:
            yield WindowRequest(path, window)


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


_VERSION = 2
_HIDDEN = "."


@dataclass(frozen=True)
class WindowRecord:
    """What remains of a window when its tokens are gone."""

    window: int
    start: Cursor
    next: Cursor  # where the following window begins
    counts: Counts
    lengths: np.ndarray  # tokens of each sample
    checksums: np.ndarray  # uint64, of each sample

    def is_like(self, other: "WindowRecord") -> bool:
        """Return whether both are of the same rows with the same content."""
        is_same = np.array_equal(self.lengths, other.lengths) and np.array_equal(self.checksums, other.checksums)
        return (self.start, self.next) == (other.start, other.next) and is_same


@dataclass(frozen=True)
class StreamFolder:
    """The folder of one stream; every entry in it appears whole or not at all."""

    path: Path

    @property
    def lock(self) -> Path:
        """Return the file that the process holds which prepares windows."""
        return self.path / "maker.lock"

    @property
    def readers(self) -> Path:
        """Return where processes ask for windows."""
        return self.path / "readers"

    @property
    def sign_of_life(self) -> Path:
        """Return the file whose time moves on as rows are prepared."""
        return self.path / "maker.alive"

    def make(self) -> None:
        """Make the folder and those in it."""
        for name in ("windows", "records", "readers"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def window(self, number: int) -> Path:
        """Return where the window's prepared set is, or would be."""
        return self.path / "windows" / _name(number)

    def windows(self) -> set[int]:
        """Return the windows that are at hand."""
        return {int(path.name) for path in (self.path / "windows").glob(f"[!{_HIDDEN}]*")}

    def staging(self, number: int) -> Path:
        """Return a new folder in which the window may be prepared."""
        path = self.path / "windows" / f"{_HIDDEN}{_name(number)}.{uuid4().hex[:8]}"
        path.mkdir()
        return path

    def damaged(self) -> list[Path]:
        """Return the windows and records that were damaged, and have been or will be prepared again."""
        folder = self.path / "damaged"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def delete_window(self, number: int) -> None:
        """Delete the window's tokens; processes that have mapped them already may continue reading."""
        gone = self.staging(number)
        self.window(number).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def delete_leftovers(self) -> None:
        """Delete what a process that was killed has left half prepared or half deleted."""
        for path in (self.path / "windows").glob(f"{_HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)

    def write_record(self, record: WindowRecord) -> None:
        """Write the record, which is never deleted."""
        path = self._record(record.window)
        digests = {}
        for name, array in (("lengths", record.lengths), ("marks", record.checksums)):
            file = BytesIO()
            np.save(file, array)
            write_bytes(path.with_suffix(f".{name}.npy"), file.getvalue(), survives_power_cut=False)
            digests[name] = xxhash.xxh3_128_hexdigest(file.getvalue())
        parts = {"start": record.start, "next": record.next, "counts": asdict(record.counts), "digests": digests}
        write_json_with_digest(path, {"version": _VERSION, **parts}, exact=True)

    def has_record(self, number: int) -> bool:
        """Return whether the window has been prepared at some time."""
        return self._record(number).exists()

    def num_records(self) -> int:
        """Return how many windows, from the first on, have been prepared at some time."""
        return next(number for number in self._numbers() if not self.has_record(number))

    def read_record(self, number: int) -> WindowRecord:
        """Return the record; one that is damaged is set aside with its window, and DamagedSet raised.

        It is there again when the window has been prepared again.
        """
        path = self._record(number)
        try:
            value = read_json_with_digest(path)
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']}")
            start, following, counts = Cursor(*value["start"]), Cursor(*value["next"]), Counts(**value["counts"])
            arrays = {name: _array(path, name, digest=digest) for name, digest in value["digests"].items()}
            return WindowRecord(number, start, following, counts, arrays["lengths"], arrays["marks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(path)
            self.set_window_aside(number)
            raise DamagedSet(path, str(error), title="the record") from error

    def set_window_aside(self, number: int) -> Path | None:
        """Rename a damaged window, so that it is prepared again; None where it is gone already."""
        return self._set_aside(self.window(number))

    def _set_aside(self, path: Path) -> Path | None:
        folder = self.path / "damaged"
        folder.mkdir(exist_ok=True)
        aside = folder / f"{path.name}-{uuid4().hex[:8]}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return None  # another process has done so
        return aside

    def _record(self, number: int) -> Path:
        return self.path / "records" / f"{_name(number)}.json"

    def _numbers(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def _name(number: int) -> str:
    return f"{number:06d}"


def _array(record: Path, name: str, *, digest: str) -> np.ndarray:
    path = record.with_suffix(f".{name}.npy")
    require_undamaged_file(path)
    content = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise Damaged(f"{path.name} does not hold what was written")
    return np.asarray(np.load(BytesIO(content), allow_pickle=False))
