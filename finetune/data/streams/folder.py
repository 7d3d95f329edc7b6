"""The windows of a stream, and its cache folder: prepared windows, a record of each, and the requests of its readers.

The shards are in an order drawn for every pass; their rows are cut into windows. `readers/NAME` holds the number of the
requested window and is locked while its process is alive; `readers/NAME.error` holds the reason if that window cannot
be prepared.
"""

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import xxhash

from finetune.data.order.order import permutation
from finetune.data.rows import RawRow
from finetune.data.sources.slices import SliceShard
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


class Cursor(NamedTuple):
    """The start of a window, as indices from 0."""

    pass_number: int
    shard: int = 0  # index in the pass's order of shards
    row: int = 0  # in that shard


START = Cursor(0)


@dataclass(frozen=True)
class StreamPlan:
    """The endless sequence of a stream's rows; each pass contains every row once."""

    shards: Sequence[SliceShard]
    window_rows: int
    seed: int
    shuffle: bool = True

    def shards_of(self, pass_number: int) -> list[SliceShard]:
        """Return the shards in the order of this pass."""
        if not self.shuffle:
            return list(self.shards)
        return [self.shards[number] for number in permutation(len(self.shards), self.seed, "shards", pass_number)]

    def describe(self, cursor: Cursor) -> str:
        """Return the position of the cursor for messages."""
        shards = self.shards_of(cursor.pass_number)
        if cursor.shard == len(shards):
            return f"the end of pass {cursor.pass_number + 1}"
        return f"{shards[cursor.shard].name} after {cursor.row:,} of its rows"


@dataclass
class WindowRows:
    """The rows of one window, iterated once. Windows do not span passes, so the last one of a pass may be shorter.

    After the iteration, `next` is the start of the following window, and `num_left_out` the number of rows that were
    skipped because they are in the validation set. Raises DataError if a whole pass has no rows.
    """

    plan: StreamPlan
    next: Cursor
    num_left_out: int = 0

    def __iter__(self) -> Iterator[RawRow]:
        num_rows = 0
        for _ in range(2):  # the cursor may be at the end of its pass, which then has no more rows
            for raw in self._rest_of_pass():
                num_rows += 1
                yield raw
            if num_rows:
                return
        raise DataError("a whole pass over the stream has no rows.")

    def _rest_of_pass(self) -> Iterator[RawRow]:
        """Yield the rows up to the end of the window or of the pass."""
        pass_number, first, row = self.next
        num_missing = self.plan.window_rows
        shards = self.plan.shards_of(pass_number)
        for number in range(first, len(shards)):
            shard = shards[number]
            self.next = Cursor(pass_number, number, row)
            rows = shard.rows(max(0, row - 1))
            if row:
                next(rows, None)  # start one row earlier, so that only rows skipped after it are counted
            before = shard.num_left_out
            for raw in rows:  # rows skipped between two rows are counted with the second one
                self.num_left_out += shard.num_left_out - before
                before = shard.num_left_out
                row += 1
                num_missing -= 1
                self.next = Cursor(pass_number, number, row)
                yield raw
                if num_missing == 0:
                    return
            self.num_left_out += shard.num_left_out - before
            row = 0
        self.next = Cursor(pass_number + 1)


NOTHING = -1
_DIGITS = 12
_ERROR = ".error"


class StreamReader:
    """Registers this process as a reader until it exits, normally or not."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError if the file system does not support locks."""
        name = f"{platform.node()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._path = folder / name
        hidden = folder / f".{name}"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike `flock`, not inherited by children
        except OSError as error:
            raise DataError(
                f"{folder} does not support file locks ({error}). Set data.cache_folder to a local disk."
            ) from error
        self.request(NOTHING)
        hidden.rename(self._path)  # other processes check the lock only from now on

    def request(self, window: int) -> None:
        """Request a window and the following ones; replaces the previous request."""
        os.pwrite(self._file, f"{window:{_DIGITS}d}".encode(), 0)
        os.fsync(self._file)  # visible to other machines that share the file system

    def close(self) -> None:
        """Unregister this process."""
        os.close(self._file)

    def raise_error(self) -> None:
        """Raise DataError if the requested window cannot be prepared."""
        path = self._path.with_name(self._path.name + _ERROR)
        with suppress(FileNotFoundError):
            raise DataError(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class WindowRequest:
    """The request of a running process."""

    path: Path
    window: int

    def answer(self, error: str) -> None:
        """Report to the process why the window cannot be prepared."""
        path = self.path.with_name(self.path.name + _ERROR)
        if not path.exists():
            write_text(path, printable(error))


def window_requests(folder: Path) -> Iterator[WindowRequest]:
    """Yield the request of every running reader, and delete the files of readers that have exited.

    Must not be called by a process that is itself a reader: closing the file would release its own lock.
    """
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix == _ERROR:
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        window = None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # its process is running
            window = int(os.pread(file, _DIGITS, 0))
        finally:
            os.close(file)
        if window is not None:
            yield WindowRequest(path, window)
            continue
        for stale in (path, path.with_name(path.name + _ERROR)):
            stale.unlink(missing_ok=True)


_VERSION = 2
_HIDDEN = "."


@dataclass(frozen=True)
class WindowRecord:
    """The facts about a window that are kept when its tokens are deleted."""

    window: int
    start: Cursor
    next: Cursor  # the start of the following window
    counts: Counts
    lengths: np.ndarray  # number of tokens of each sample
    checksums: np.ndarray  # uint64, of each sample


class StreamFolder:
    """The folder of one stream; every file in it is written atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "maker.lock"  # of the process that prepares windows
        self.readers = path / "readers"  # in which processes request windows
        self.heartbeat = path / "maker.alive"  # its modification time advances as rows are prepared

    def make(self) -> None:
        """Create the folder and its subfolders."""
        for name in ("windows", "records", "readers"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def window(self, number: int) -> Path:
        """Return the folder of the window's prepared set, which may not exist."""
        return self.path / "windows" / f"{number:06d}"

    def windows(self) -> set[int]:
        """Return the windows that are prepared."""
        return {int(path.name) for path in (self.path / "windows").glob(f"[!{_HIDDEN}]*")}

    def staging(self, number: int) -> Path:
        """Create and return a folder in which the window can be prepared."""
        path = self.path / "windows" / f"{_HIDDEN}{number:06d}.{uuid4().hex[:8]}"
        path.mkdir()
        return path

    def damaged(self) -> list[Path]:
        """Return the quarantined windows and records, which have been or will be prepared again."""
        folder = self.path / "damaged"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def delete_window(self, number: int) -> None:
        """Delete the window's tokens; processes that have already mapped them can continue reading."""
        deleted = self.staging(number)
        self.window(number).rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)

    def delete_leftovers(self) -> None:
        """Delete incomplete windows of a process that was killed."""
        for path in (self.path / "windows").glob(f"{_HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)

    def write_record(self, record: WindowRecord) -> None:
        """Write the record; records are never deleted."""
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
        """Return whether the window has ever been prepared."""
        return self._record(number).exists()

    def num_records(self) -> int:
        """Return the number of windows that have ever been prepared, without gaps."""
        return next(number for number in count() if not self.has_record(number))

    def read_record(self, number: int) -> WindowRecord:
        """Return the record; a damaged one is quarantined together with its window, and DamagedSet is raised.

        It is written again when the window is prepared again.
        """
        path = self._record(number)
        try:
            value = read_json_with_digest(path)
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']}")
            start, following, counts = Cursor(*value["start"]), Cursor(*value["next"]), Counts(**value["counts"])
            arrays: dict[str, np.ndarray] = {}
            for name, digest in value["digests"].items():
                file = path.with_suffix(f".{name}.npy")
                require_undamaged_file(file)
                content = file.read_bytes()
                if xxhash.xxh3_128_hexdigest(content) != digest:
                    raise Damaged(f"the content of {file.name} has changed since it was written")
                arrays[name] = np.asarray(np.load(BytesIO(content), allow_pickle=False))
            return WindowRecord(number, start, following, counts, arrays["lengths"], arrays["marks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.quarantine(path)
            self.quarantine(self.window(number))
            raise DamagedSet(path, str(error), title="the record") from error

    def quarantine(self, path: Path) -> Path | None:
        """Rename a damaged window or record, so that it is prepared again; None if another process was faster."""
        folder = self.path / "damaged"
        folder.mkdir(exist_ok=True)
        quarantined = folder / f"{path.name}-{uuid4().hex[:8]}"
        try:
            path.rename(quarantined)
        except FileNotFoundError:
            return None
        return quarantined

    def _record(self, number: int) -> Path:
        return self.path / "records" / f"{number:06d}.json"
