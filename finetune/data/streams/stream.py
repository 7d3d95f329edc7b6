"""A stream: rows that are prepared window by window during training, for data larger than the disk."""

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from finetune.data.audit import Streamed
from finetune.data.features import Features
from finetune.data.order.order import (
    DatasetView,
    Order,
    Samples,
    fingerprint_of,
    set_order,
    split_stream_index,
    token_budget,
    window_offset,
)
from finetune.data.sources.source import Source, stream_of
from finetune.data.streams.windows import NUM_KEPT_WINDOWS, StreamFolder, StreamJob, StreamPlan, WindowRecord
from finetune.data.token_cache.cache import identify, set_folder
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.counts import Counts, total_counts
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.store import MAX_NAMED, TokenCache
from finetune.errors import DataError
from finetune.runtime.optional import no_op
from finetune.runtime.seeds import derive_seed
from finetune.runtime.supervision.heartbeat import keep_alive

T = TypeVar("T")

_COMMAND = """
import sys
from finetune.runtime.processes import exit_with_pipe, ignore_run_signals
ignore_run_signals()
exit_with_pipe(int(sys.argv[1]))
from finetune.data.streams.windows import main
main()
"""
"""The program of a producer: before torch is imported, which takes seconds, it ends when it should."""

_POLL_SECONDS = 0.05
_QUIET_SECONDS = 2.0
"""Waiting for a window is logged after this time."""

_MAX_STARTS = 3
_OPEN_WINDOWS = NUM_KEPT_WINDOWS + 2


class Windows:
    """The windows of a stream, for any process of a run; starts the process that prepares them if there is none.

    A forked or pickled copy requests and waits on its own. Processes wait for files, never in a collective.
    """

    def __init__(self, job: StreamJob, log: Callable[[str], None]) -> None:
        self.job = job
        self.prepared = lru_cache(maxsize=_OPEN_WINDOWS)(self._open)
        self.record = lru_cache(maxsize=_OPEN_WINDOWS)(self._read)
        self._log = log
        self._starter = os.getpid()
        self._producers: list[ProducerProcess] = []  # that this process has started
        self._num_failed_starts = 0  # since the last window

    def __reduce__(self) -> tuple[Any, ...]:
        return Windows, (self.job, no_op)

    def open(self) -> int:
        """Request the first window unless it has ever been prepared; return the number of windows that have been."""
        try:
            self.job.folder.make()
        except OSError as error:
            raise DataError(f"data.cache_folder: {self.job.folder.path} cannot be written: {error}.") from error
        num_records = self.job.folder.num_records()
        if not num_records:
            self._request(0)
        return num_records

    def if_prepared(self, window: int) -> TokenCache | None:
        """Return the window's samples if it is prepared, verified; a damaged one is deleted. Requests nothing."""
        path = self.job.folder.window(window)
        try:
            if not path.exists():
                return None
            prepared = TokenCache(path)
            prepared.verify()
            return prepared
        except DamagedSet as damage:
            if path.exists():  # otherwise deleted while it was being opened
                self.job.folder.delete_window(window)
                self._log(f"warning: {self.job.key}: window {window}: {damage}. It will be prepared again.")
            return None

    def close(self) -> None:
        """End the processes that this one started."""
        for producer in self._producers if self._starter == os.getpid() else ():
            producer.end()
        self._producers = []

    def _open(self, window: int) -> TokenCache:
        """Return the window's samples; waits until it has been prepared, raises DataError if that fails."""
        self._request(window)  # even if it is prepared: the following ones are prefetched
        return self._wait(window, lambda: self.if_prepared(window))

    def _read(self, window: int) -> WindowRecord:
        """Return the window's record; waits until it has been prepared, raises DataError if that fails."""
        folder = self.job.folder
        while True:
            self._wait(window, lambda: folder.record(window).exists() or None)
            try:
                return folder.read_record(window)
            except DamagedSet as damage:
                self._log(f"warning: {self.job.key}: {damage}. Its window will be prepared again.")

    def _wait(self, window: int, read: Callable[[], T | None]) -> T:
        """Return the result of `read` once it is not None; raises DataError if preparing the window fails."""
        start, is_logged, last_heartbeat = time.monotonic(), False, 0
        while (result := read()) is None:
            if not self._request(window):
                self.job.folder.raise_failure(window)
            if not is_logged and time.monotonic() - start > _QUIET_SECONDS:
                is_logged = True
                self._log(f"{self.job.key}: waiting for window {window} to be prepared")
            path = self.job.folder.heartbeat
            heartbeat = path.stat().st_mtime_ns if path.exists() else 0
            if heartbeat != last_heartbeat:
                keep_alive()
            last_heartbeat = heartbeat
            time.sleep(_POLL_SECONDS)
        self._num_failed_starts = 0
        return result

    def _request(self, window: int) -> bool:
        """Request the window; return whether the process that prepares windows, which holds a lock, was started now."""
        if self._starter != os.getpid():  # this is a forked copy
            self._starter, self._log = os.getpid(), no_op
            self._producers, self._num_failed_starts = [], 0
        folder = self.job.folder
        folder.request(window)
        lock = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._num_failed_starts >= _MAX_STARTS:
                code = self._producers[-1].process.poll()
                raise DataError(
                    f"{self.job.key}: the process that prepares windows exited {_MAX_STARTS} times, most recently "
                    f"with code {code} (-9: killed, perhaps out of memory). Its output is above."
                )
            folder.failure.unlink(missing_ok=True)  # of an earlier run
            self._producers.append(ProducerProcess(self.job, lock=lock))
            self._num_failed_starts += 1
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise DataError(
                f"{folder.path} does not support file locks ({error}). Set data.cache_folder to a local disk."
            ) from error
        finally:
            os.close(lock)  # the child keeps its copy


class ProducerProcess:
    """The process that prepares windows; it exits with this process, which started it."""

    def __init__(self, job: StreamJob, *, lock: int) -> None:
        child_end, self._pipe = os.pipe()
        with tempfile.TemporaryFile() as pickled_job:
            pickle.dump(job, pickled_job)
            pickled_job.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(child_end)],
                stdin=pickled_job,
                pass_fds=(lock, child_end),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(child_end)

    def end(self) -> None:
        """Make it exit and wait for it."""
        os.close(self._pipe)
        self.process.wait()


_KEPT_ORDERS = 4


class StreamOrder(Order):
    """An endless sequence of positions that depends only on the lengths of the samples in each window.

    `arrange(window)` returns the order of a window, used for one epoch, or None for a window without samples. It may
    block until the window has been prepared.
    """

    num_positions = None  # unknown before a whole pass has been prepared

    def __init__(self, arrange: Callable[[int], Order | None]) -> None:
        self._arranged = lru_cache(maxsize=_KEPT_ORDERS)(arrange)
        self._ends: list[int] = []  # of the positions of each known window

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop), window by window."""
        while start < stop:
            while not self._ends or self._ends[-1] <= start:
                order = self._arranged(len(self._ends))
                num_positions = 0 if order is None else order.num_positions or 0
                self._ends.append((self._ends[-1] if self._ends else 0) + num_positions)
            window = bisect_right(self._ends, start)
            order, window_start = self._arranged(window), self._ends[window - 1] if window else 0
            last = min(self._ends[window], stop)
            assert order is not None, "a position is in a window with samples"
            yield order.samples(start - window_start, last - window_start) + window_offset(window)
            start = last


@dataclass(frozen=True)
class StreamSamples(Samples):
    """Encoded samples by id, without precomputed arrays; waits until a deleted window has been prepared again."""

    windows: Windows

    def __getitem__(self, sample_id: int) -> Features:
        window, index = split_stream_index(sample_id)
        return Features(self.windows.prepared(window)[index].arrays, sample_id)

    def location(self, sample_id: int) -> str:
        """Return the location of its row for messages; only the window's if that is no longer prepared."""
        window, index = split_stream_index(sample_id)
        prepared = self.windows.if_prepared(window)
        if prepared is not None:
            return prepared.location(index)
        start = self.windows.job.plan.describe(self.windows.record(window).start)
        return f"sample {index} of window {window} (starting at {start})"

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample, also of deleted windows."""
        return self._recorded(sample_ids, lambda record: record.lengths, np.int64)

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample, also of deleted windows."""
        return self._recorded(sample_ids, lambda record: record.checksums, np.uint64)

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about samples that the loader delivered damaged; their windows are prepared again."""
        locations = "; ".join(self.location(sample_id) for sample_id in damaged[:MAX_NAMED].tolist())
        windows = sorted({split_stream_index(sample_id)[0] for sample_id in damaged.tolist()})
        deleted = [window for window in windows if self.windows.if_prepared(window) is None]
        remedy = "Run the same command again: it resumes from the last checkpoint."
        if deleted:
            remedy = f"Deleted windows: {', '.join(map(str, deleted))}; they are prepared again. {remedy}"
        else:
            remedy = f"The copy on disk is intact: the sample was corrupted in the memory of a process. {remedy}"
        return f"{locations}: differs from the prepared sample", remedy

    def _recorded(
        self, sample_ids: np.ndarray, read: Callable[[WindowRecord], np.ndarray], dtype: type[np.generic]
    ) -> np.ndarray:
        indices = [split_stream_index(sample_id) for sample_id in sample_ids.tolist()]
        values = {window: read(self.windows.record(window)) for window in sorted({window for window, _ in indices})}
        return np.array([values[window][index] for window, index in indices], dtype)


Log = Callable[[str], None]


def stream_view(
    source: Source,
    encoding: Encoding,
    *,
    seed: int,
    log: Log,
) -> tuple[DatasetView, Streamed]:
    """Return the source's rows as an endless dataset view, and their counts; starts the process that prepares windows.

    Raises DataError if the cache folder cannot be written. Refused rows raise it when their window is reached, in
    every process that waits for it.
    """
    stream, section = stream_of(source.section), encoding.section
    assert stream is not None
    plan = StreamPlan(source.shards(), stream.window_rows, seed=seed, shuffle=section.shuffle)
    windows_identity = {
        "listing": source.identity(reads_content=False),
        "window_rows": plan.window_rows,
        "seed": plan.seed if plan.shuffle else None,
    }
    identity = identify(source, encoding, stream=windows_identity)
    folder = set_folder(section, "streams", identity, key=source.key, log=log)
    job = StreamJob(
        folder=StreamFolder(folder),
        key=source.key,
        plan=plan,
        encoding=replace(encoding, format=source.format),
        num_ahead=stream.num_ahead,
        identity=identity,
    )
    windows = Windows(job, log)
    num_before = windows.open()
    passes = "in a new order for every pass" if plan.shuffle else "in order"
    shuffled = ", shuffled within each window" if plan.shuffle else ""
    log(
        f"{job.key}: a stream of {len(plan.shards):,} files or shards {passes}, in windows of {plan.window_rows:,} rows"
        f"{shuffled}; prefetched windows: {job.num_ahead}"
    )
    if num_before:
        log(f"{job.key}: {num_before:,} windows were prepared earlier; needed ones are prepared again")
    order = StreamOrder(WindowOrders(windows, log, num_logged=num_before))
    budget = token_budget(section.batching, max_length=section.longest)
    fingerprint = fingerprint_of(identity.fingerprint, section.shuffle, section.batching.by, budget)
    counts = Streamed(lambda: total_counts(windows.record(n).counts for n in range(job.folder.num_records())))
    return DatasetView(StreamSamples(windows), order, fingerprint), counts


@dataclass(eq=False)
class WindowOrders:
    """Orders the samples of a window like a prepared set, and logs the counts of every new window."""

    windows: Windows
    log: Log
    num_logged: int  # windows that an earlier process has logged
    num_counted: int = 0
    counts: Counts = Counts()  # noqa: RUF009  # frozen; of all windows that have been arranged

    def __call__(self, window: int) -> Order | None:
        """Return the order of the window, None if it has no samples; waits until it has been prepared.

        Raises DataError after a whole pass without samples.
        """
        plan, section = self.windows.job.plan, self.windows.job.encoding.section
        record = self.windows.record(window)
        order = None
        if len(record.lengths):
            order = set_order(
                record.lengths,
                seed=derive_seed(plan.seed, "window", window),
                shuffle=section.shuffle,
                batching=section.batching,
                max_length=section.longest,
            )
        if window < self.num_counted:
            return order
        self.counts = self.counts.plus(record.counts)
        self.num_counted += 1
        job = self.windows.job
        if self.counts.samples == 0 and record.next.pass_number > 0:
            raise DataError(
                f"{job.key}: a whole pass over the stream leaves no sample: {'; '.join(self.counts.lines())}."
            )
        if window >= self.num_logged:
            batching = section.batching
            grouped = () if order is None or batching.by == "samples" else (f"{order.num_positions:,} {batching.unit}",)
            self.log(f"{job.key}: window {window}: {'; '.join((*record.counts.lines(), *grouped))}")
            if self.num_counted & (self.num_counted - 1) == 0 and window:  # after 2, 4, 8, ... windows
                self.log(f"{job.key}: {self.num_counted:,} windows so far: {'; '.join(self.counts.lines())}")
        return order
