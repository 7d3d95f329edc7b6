"""The process that prepares a stream's windows while others train: those in use, a few in advance, and no more."""

import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from finetune.config.sections.data import DataSection
from finetune.data.order.stream_plan import START, StreamPlan, WindowRows
from finetune.data.rows import RawRow
from finetune.data.streams.folder import NOTHING, StreamFolder, WindowRecord, window_requests
from finetune.data.token_cache.build import build_set, refuse_counts, refuse_shares
from finetune.data.token_cache.chunks import EncodingPlan
from finetune.data.token_cache.encoder_pool import EncoderPool
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.store import Identity, TokenCache
from finetune.data.workers import num_prepare_workers
from finetune.errors import DataError
from finetune.runtime.processes import ignore_run_signals
from finetune.runtime.text.library_output import quiet_libraries

NUM_KEPT_WINDOWS = 2
"""Windows that are kept behind the one in use: a step, or samples sorted by length, may reach back into them."""

_PAUSE_SECONDS = 0.05
_PAUSES_BEFORE_RETRIES = (1.0, 5.0, 25.0)
_ROWS_BETWEEN_SIGNS = 256


@dataclass(frozen=True)
class StreamJob:
    """All that it takes to prepare the windows of one stream."""

    folder: StreamFolder
    key: str  # place of the source in the job YAML
    plan: StreamPlan
    encoding_plan: EncodingPlan
    section: DataSection
    num_ahead: int
    made_of: Identity

    @cached_property
    def encoders(self) -> EncoderPool:
        """Return what encodes the rows; its workers are kept from window to window."""
        return EncoderPool(self.encoding_plan, num_workers=num_prepare_workers(self.section))


def main() -> None:
    """Prepare windows for the processes that ask, until none of them lives; the job comes through standard input.

    It ends, too, with the process that has started it: that one keeps the other end of a pipe, named as argument, open.
    """
    threading.Thread(target=_end_with_starter, args=(int(sys.argv[1]),), daemon=True).start()
    ignore_run_signals()
    quiet_libraries(is_main=False)
    serve(pickle.load(sys.stdin.buffer))


def serve(job: StreamJob) -> None:
    """Prepare what living readers want and delete what is behind, until there is no reader."""
    failed: dict[int, str] = {}
    job.folder.delete_leftovers()
    while wanted := list(window_requests(job.folder.readers)):
        windows = [request.window for request in wanted if request.window != NOTHING]
        at_hand = job.folder.windows()
        for old in windows_to_delete(at_hand, windows, num_ahead=job.num_ahead):
            job.folder.delete_window(old)
        for request in wanted:
            if failed and request.window >= min(failed):
                request.answer(failed[min(failed)])
        window = next_window(windows, at_hand=at_hand, failed=failed, num_ahead=job.num_ahead)
        if window is None:
            time.sleep(_PAUSE_SECONDS)
            continue
        first = min(window, job.folder.num_records())  # a window begins where the one before it ended
        if error := _made(job, first):
            failed[first] = error


def windows_to_delete(at_hand: Collection[int], wanted: Sequence[int], *, num_ahead: int) -> list[int]:
    """Return the windows that no reader has use for: not the one in use, nor two before it and those after it.

    >>> windows_to_delete([0, 1, 2, 3, 4, 5], [3], num_ahead=1)
    [0, 5]
    """
    kept = {window for first in wanted for window in range(first - NUM_KEPT_WINDOWS, first + num_ahead + 1)}
    return sorted(set(at_hand) - kept) if wanted else []


def next_window(
    wanted: Sequence[int], *, at_hand: Collection[int], failed: Collection[int], num_ahead: int
) -> int | None:
    """Return the window to prepare next, those in use first; None where all are there, or cannot be prepared.

    >>> next_window([3, 7], at_hand=[3], failed=[], num_ahead=2)
    7
    """
    nearest_first = (first + offset for offset in range(num_ahead + 1) for first in sorted(wanted))
    end = min(failed, default=None)
    return next((each for each in nearest_first if each not in at_hand and (end is None or each < end)), None)


def _made(job: StreamJob, window: int) -> str | None:
    """Prepare the window, and return the reason if that fails; storage out of reach is tried again."""
    pauses = list(_PAUSES_BEFORE_RETRIES)
    while True:
        try:
            make_window(job, window)
        except DamagedSet:
            return None  # a record, which is set aside: its window is the first to be prepared now
        except DataError as error:
            if not pauses or not _may_pass(error):
                return str(error)
            time.sleep(pauses.pop(0))
        except OSError as error:
            return (
                f"data.cache_folder: window {window} of {job.key} cannot be written to {job.folder.path}: {error}. "
                f"Free disk space, set another folder, or lower {job.key}.stream.window_rows."
            )
        except Exception:
            failed = f"{job.key}: window {window} could not be prepared because of an internal error"
            return f"{failed}:\n{traceback.format_exc()}"
        else:
            return None


def make_window(job: StreamJob, window: int) -> None:
    """Prepare the window and record it; raises DataError for what the section refuses, OSError for a full disk."""
    folder = job.folder
    start = folder.read_record(window - 1).next if window else START
    rows, staging = job.plan.window(start), folder.staging(window)
    made_of = replace(job.made_of, fingerprint=f"{job.made_of.fingerprint}/{window}")
    try:
        counts = build_set(
            staging, _with_signs(rows, folder), job.encoders, made_of, num_left_out=lambda: rows.num_left_out
        )
        key = f"{job.key}: window {window}"
        refuse_counts(counts, job.section, key=key, length=job.encoding_plan.length, needs_samples=False)
        prepared = _as_written(staging, key=key)
        refuse_shares(prepared, job.section.audit, key=key)
        record = WindowRecord(window, start, rows.next, counts, prepared.lengths, prepared.checksums)
        _keep(job, record)
        staging.rename(folder.window(window))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _as_written(folder: Path, *, key: str) -> TokenCache:
    try:
        return TokenCache(folder)
    except DamagedSet as damage:
        raise DataError(f"{key}: {damage}, as soon as it was written. Check the disk of data.cache_folder.") from damage


def _keep(job: StreamJob, record: WindowRecord) -> None:
    """Write the record; raises DataError where the window was another one when it was prepared before."""
    if not job.folder.has_record(record.window):
        job.folder.write_record(record)
    elif not job.folder.read_record(record.window).is_like(record):
        raise DataError(
            f"{job.key}: window {record.window} (from {job.plan.place(record.start)} on) has other rows than when it "
            "was prepared before, so the files have changed since. Restore them, or write another run.folder and "
            f"delete {job.folder.path}."
        )


class UnreadableRows(DataError):
    """Rows that could not be read: raised from a shard's own error, with its cause."""


def _with_signs(rows: WindowRows, folder: StreamFolder) -> Iterator[RawRow]:
    """Yield the rows, with a sign now and then that it continues; raises Unreadable where a shard raises DataError."""
    try:
        for number, row in enumerate(rows):
            if number % _ROWS_BETWEEN_SIGNS == 0:
                folder.sign_of_life.touch()
            yield row
    except DataError as error:
        raise UnreadableRows(str(error)) from error.__cause__


def _may_pass(error: DataError) -> bool:
    """Return whether the cause is one that may pass: storage that does not answer, not what is wrong with a file.

    Each storage has exceptions of its own; what is wrong with content is a DataError, ValueError or EOFError.
    """
    cause = error.__cause__
    lasting = (FileNotFoundError, PermissionError, DataError, ValueError, EOFError)
    return isinstance(error, UnreadableRows) and cause is not None and not isinstance(cause, lasting)


def _end_with_starter(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(0)
