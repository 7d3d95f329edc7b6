"""The windows of a stream: which rows each holds, their folder in the cache, and the process that prepares them.

The shards are in an order drawn for every pass; their rows are cut into windows. Processes that read windows write the
number of the one that they need into the file `requested`. The process that prepares windows keeps those around it,
and a record of every window that has ever been prepared.
"""

import pickle
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from finetune.data.loader import num_prepare_workers
from finetune.data.order.order import permutation
from finetune.data.rows import RawRow
from finetune.data.sources.slices import SliceShard
from finetune.data.token_cache.cache import build_set, refuse_counts, refuse_shares
from finetune.data.token_cache.chunks import EncoderPool, Encoding
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.samples import ArrayFile, write_array_file
from finetune.data.token_cache.store import Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.files.atomic import write_bytes
from finetune.runtime.files.digests import Damaged
from finetune.runtime.text.terminal import printable, quiet_libraries


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


_HIDDEN = "."


@dataclass(frozen=True)
class WindowRecord:
    """The facts about a window that are kept when its tokens are deleted."""

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
        self.heartbeat = path / "maker.alive"  # its modification time advances as rows are prepared
        self.failure = path / "maker.error"  # the window that could not be prepared, and the reason
        self._requested = path / "requested"

    def make(self) -> None:
        """Create the folder and its subfolders."""
        for name in ("windows", "records"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def request(self, window: int) -> None:
        """Request a window and the following ones; replaces earlier requests, also of other processes."""
        write_bytes(self._requested, str(window).encode(), survives_power_cut=False)

    def requested(self) -> int:
        """Return the window that was requested last."""
        return int(self._requested.read_bytes())

    def fail(self, window: int, error: str) -> None:
        """Record why the window cannot be prepared."""
        write_bytes(self.failure, f"{window} {printable(error)}".encode(), survives_power_cut=False)

    def raise_failure(self, window: int) -> None:
        """Raise DataError if this window, or one before it, could not be prepared."""
        with suppress(FileNotFoundError):
            failed, _, error = self.failure.read_text(encoding="utf-8").partition(" ")
            if window >= int(failed):
                raise DataError(error)

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

    def delete_window(self, number: int) -> None:
        """Delete the window's tokens; processes that have already mapped them can continue reading."""
        deleted = self.staging(number)
        with suppress(FileNotFoundError):  # another process has deleted it
            self.window(number).rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)

    def delete_leftovers(self) -> None:
        """Delete incomplete windows of a process that was killed."""
        for path in (self.path / "windows").glob(f"{_HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)

    def write_record(self, number: int, record: WindowRecord) -> None:
        """Write the record of the window; records are never deleted unless they are damaged."""
        arrays = {"lengths": record.lengths, "marks": record.checksums}
        facts = {"start": record.start, "next": record.next, "counts": asdict(record.counts)}
        pieces = {name: (array.dtype, [array]) for name, array in arrays.items()}
        write_array_file(self.record(number), pieces, metadata=facts)

    def num_records(self) -> int:
        """Return the number of windows that have ever been prepared, without gaps."""
        return next(number for number in count() if not self.record(number).exists())

    def read_record(self, number: int) -> WindowRecord:
        """Return the record; a damaged one is deleted together with its window, and DamagedSet is raised.

        It is written again when the window is prepared again.
        """
        path = self.record(number)
        try:
            file = ArrayFile(path)
            file.verify()
        except Damaged as damage:
            path.unlink(missing_ok=True)
            self.delete_window(number)
            raise DamagedSet(path, str(damage), title="the record") from damage
        start, following = Cursor(*file.metadata["start"]), Cursor(*file.metadata["next"])
        counts = Counts.read(file.metadata["counts"])
        return WindowRecord(start, following, counts, file.arrays["lengths"], file.arrays["marks"])

    def record(self, number: int) -> Path:
        """Return the file of the window's record, which may not exist."""
        return self.path / "records" / f"{number:06d}.bin"


NUM_KEPT_WINDOWS = 2
"""Windows that are kept before the one in use: a step, or samples sorted by length, may still read them."""

_POLL_SECONDS = 0.05
_RETRY_SECONDS = (1.0, 5.0, 25.0)
_ROWS_BETWEEN_HEARTBEATS = 256


@dataclass(frozen=True)
class StreamJob:
    """The inputs for preparing the windows of one stream."""

    folder: StreamFolder
    key: str  # of the source in the job YAML
    plan: StreamPlan
    encoding: Encoding
    num_ahead: int
    identity: Identity

    @cached_property
    def encoders(self) -> EncoderPool:
        """Return the pool that encodes rows; its workers are kept across windows."""
        return EncoderPool(self.encoding, num_workers=num_prepare_workers(self.encoding.section))


def main() -> None:
    """Prepare windows until the process that started this one ends; the job is read from standard input.

    `stream.ProducerProcess` starts it.
    """
    quiet_libraries(is_main=False)
    job: StreamJob = pickle.load(sys.stdin.buffer)
    job.folder.failure.unlink(missing_ok=True)
    job.folder.delete_leftovers()
    while True:
        if not prepare_next(job):
            time.sleep(_POLL_SECONDS)


def prepare_next(job: StreamJob) -> bool:
    """Prepare the next window around the requested one, and delete others; return whether there was one to prepare."""
    folder, first = job.folder, job.folder.requested()
    kept = range(first - NUM_KEPT_WINDOWS, first + job.num_ahead + 1)
    prepared = folder.windows()
    for window in sorted(prepared - set(kept)):
        folder.delete_window(window)
    missing = next((window for window in kept[NUM_KEPT_WINDOWS:] if window not in prepared), None)
    if missing is None:
        return False
    window = min(missing, folder.num_records())  # a window starts at the end of the previous one
    try:
        folder.raise_failure(window)
    except DataError:
        return False
    if error := _prepare_window(job, window):
        folder.fail(window, error)
    return True


def _prepare_window(job: StreamJob, window: int) -> str | None:
    """Prepare the window and return the reason if that fails; unreachable storage is retried."""
    pauses = list(_RETRY_SECONDS)
    while True:
        try:
            make_window(job, window)
        except DamagedSet:
            return None  # of a record, now deleted: its window is prepared first
        except DataError as error:
            # Retrying may help if the storage did not respond: storage libraries raise their own exceptions, while
            # invalid content is a DataError, ValueError or EOFError.
            cause = error.__cause__
            permanent = (FileNotFoundError, PermissionError, DataError, ValueError, EOFError)
            is_transient = isinstance(error, UnreadableRows) and cause is not None and not isinstance(cause, permanent)
            if not pauses or not is_transient:
                return str(error)
            time.sleep(pauses.pop(0))
        except OSError as error:
            return (
                f"data.cache_folder: writing window {window} of {job.key} to {job.folder.path} failed: {error}. "
                f"Free disk space, set another folder, or lower {job.key}.stream.window_rows."
            )
        except Exception:
            return f"{job.key}: internal error while preparing window {window}:\n{traceback.format_exc()}"
        else:
            return None


def make_window(job: StreamJob, window: int) -> None:
    """Prepare the window and write its record; raises DataError for refused rows, OSError for a full disk."""
    folder = job.folder
    start = folder.read_record(window - 1).next if window else START
    rows, staging = WindowRows(job.plan, start), folder.staging(window)
    identity = replace(job.identity, fingerprint=f"{job.identity.fingerprint}/{window}")
    try:
        counts = build_set(
            staging, _with_heartbeat(rows, folder), job.encoders, identity, num_left_out=lambda: rows.num_left_out
        )
        key = f"{job.key}: window {window}"
        refuse_counts(counts, job.encoding, key=key)
        try:
            prepared = TokenCache(staging)
        except DamagedSet as damage:
            raise DataError(f"{key}: {damage}, just after writing. Check the disk of data.cache_folder.") from damage
        refuse_shares(prepared, job.encoding.section.audit, key=key)
        record = WindowRecord(start, rows.next, counts, prepared.lengths, prepared.checksums)
        if not folder.record(window).exists():
            folder.write_record(window, record)
        else:
            first = folder.read_record(window)
            has_same_rows = (first.start, first.next) == (start, rows.next)
            has_same_lengths = np.array_equal(first.lengths, record.lengths)
            if not (has_same_rows and has_same_lengths and np.array_equal(first.checksums, record.checksums)):
                raise DataError(
                    f"{key} (starting at {job.plan.describe(start)}) has different rows than when it was first "
                    f"prepared: the files have changed. Restore them, or set another run.folder and delete "
                    f"{folder.path}."
                )
        folder.delete_window(window)  # one without a record
        staging.rename(folder.window(window))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class UnreadableRows(DataError):
    """A shard could not be read; its cause is that of the shard's error."""


def _with_heartbeat(rows: WindowRows, folder: StreamFolder) -> Iterator[RawRow]:
    """Yield the rows and touch the heartbeat file; raises UnreadableRows for a DataError of a shard."""
    try:
        for number, row in enumerate(rows):
            if number % _ROWS_BETWEEN_HEARTBEATS == 0:
                folder.heartbeat.touch()
            yield row
    except DataError as error:
        raise UnreadableRows(str(error)) from error.__cause__
