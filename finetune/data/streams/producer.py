"""The process that prepares a stream's windows during training: those in use and a few prefetched ones."""

import pickle
import shutil
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from finetune.config.sections.data import DataSection
from finetune.data.rows import RawRow
from finetune.data.streams.folder import (
    NOTHING,
    START,
    StreamFolder,
    StreamPlan,
    WindowRecord,
    WindowRows,
    window_requests,
)
from finetune.data.token_cache.cache import build_set, refuse_counts, refuse_shares
from finetune.data.token_cache.chunks import EncoderPool, EncodingPlan
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.store import Identity, TokenCache
from finetune.data.workers import num_prepare_workers
from finetune.errors import DataError
from finetune.runtime.text.terminal import quiet_libraries

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
    encoding_plan: EncodingPlan
    section: DataSection
    num_ahead: int
    identity: Identity

    @cached_property
    def encoders(self) -> EncoderPool:
        """Return the pool that encodes rows; its workers are kept across windows."""
        return EncoderPool(self.encoding_plan, num_workers=num_prepare_workers(self.section))


def main() -> None:
    """Prepare windows for the processes that request them until all have exited; the job is read from standard input.

    `stream.ProducerProcess` starts it.
    """
    quiet_libraries(is_main=False)
    serve(pickle.load(sys.stdin.buffer))


def serve(job: StreamJob) -> None:
    """Prepare the windows that readers request and delete those no longer needed, until there are no readers."""
    failed: dict[int, str] = {}
    job.folder.delete_leftovers()
    while requests := list(window_requests(job.folder.readers)):
        requested = [request.window for request in requests if request.window != NOTHING]
        prepared = job.folder.windows()
        for window in windows_to_delete(prepared, requested, num_ahead=job.num_ahead):
            job.folder.delete_window(window)
        for request in requests:
            if failed and request.window >= min(failed):
                request.answer(failed[min(failed)])
        upcoming = next_window(requested, prepared=prepared, failed=failed, num_ahead=job.num_ahead)
        if upcoming is None:
            time.sleep(_POLL_SECONDS)
            continue
        first = min(upcoming, job.folder.num_records())  # a window starts at the end of the previous one
        if error := _prepare_window(job, first):
            failed[first] = error


def windows_to_delete(prepared: Collection[int], requested: Sequence[int], *, num_ahead: int) -> list[int]:
    """Return the prepared windows that no reader needs: all but those in use, two before them and the prefetched ones.

    >>> windows_to_delete([0, 1, 2, 3, 4, 5], [3], num_ahead=1)
    [0, 5]
    """
    kept = {window for first in requested for window in range(first - NUM_KEPT_WINDOWS, first + num_ahead + 1)}
    return sorted(set(prepared) - kept) if requested else []


def next_window(
    requested: Sequence[int], *, prepared: Collection[int], failed: Collection[int], num_ahead: int
) -> int | None:
    """Return the next window to prepare, requested ones first; None if there is none or preparing it failed.

    >>> next_window([3, 7], prepared=[3], failed=[], num_ahead=2)
    7
    """
    nearest_first = (first + offset for offset in range(num_ahead + 1) for first in sorted(requested))
    end = min(failed, default=None)
    missing = (window for window in nearest_first if window not in prepared)
    return next((window for window in missing if end is None or window < end), None)


def _prepare_window(job: StreamJob, window: int) -> str | None:
    """Prepare the window and return the reason if that fails; unreachable storage is retried."""
    pauses = list(_RETRY_SECONDS)
    while True:
        try:
            make_window(job, window)
        except DamagedSet:
            return None  # of a record, now quarantined: its window is prepared first
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
        refuse_counts(counts, job.section, key=key, plan=job.encoding_plan)
        try:
            prepared = TokenCache(staging)
        except DamagedSet as damage:
            raise DataError(f"{key}: {damage}, just after writing. Check the disk of data.cache_folder.") from damage
        refuse_shares(prepared, job.section.audit, key=key)
        record = WindowRecord(window, start, rows.next, counts, prepared.lengths, prepared.checksums)
        if not folder.has_record(window):
            folder.write_record(record)
        else:
            first = folder.read_record(window)
            has_same_rows = (first.start, first.next) == (start, rows.next)
            has_same_samples = np.array_equal(first.lengths, record.lengths) and np.array_equal(
                first.checksums, record.checksums
            )
            if not (has_same_rows and has_same_samples):
                raise DataError(
                    f"{key} (starting at {job.plan.describe(start)}) has different rows than when it was first "
                    f"prepared: the files have changed. Restore them, or set another run.folder and delete "
                    f"{folder.path}."
                )
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
