"""A stream: rows that are prepared window after window while the model trains, for data that the disk cannot hold."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from finetune.data.audit.audit import Streamed
from finetune.data.features import Features
from finetune.data.order.dataset_view import DatasetView, fingerprint_of, split_stream_index, window_offset
from finetune.data.order.grouping import set_order, tokens_per_position
from finetune.data.order.order import Order, PiecewiseOrder
from finetune.data.order.stream_plan import StreamPlan
from finetune.data.sources.source import Source, stream_of
from finetune.data.streams.folder import StreamFolder, WindowRecord
from finetune.data.streams.producer import StreamJob
from finetune.data.streams.windows import Windows
from finetune.data.token_cache.cache import cache_folder, folder_name, identify, log_older_versions
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.counts import Counts, total_counts
from finetune.data.token_cache.store import MAX_NAMED
from finetune.errors import DataError
from finetune.runtime.seeds import derive_seed

_KEPT_ORDERS = 4


class StreamOrder(PiecewiseOrder):
    """An endless sequence of positions that follows from the lengths of the samples in each window alone.

    `arrange(window)` gives the order of a window, of which one epoch is taken; None where no sample is in it. It may
    wait until the window has been prepared.
    """

    num_positions = None  # nobody knows before a whole pass has been prepared

    def __init__(self, arrange: Callable[[int], Order | None]) -> None:
        self._arranged = lru_cache(maxsize=_KEPT_ORDERS)(arrange)
        self._ends: list[int] = []  # of each window's positions, as far as they are known

    def window_at(self, position: int) -> int:
        """Return the window that holds the position."""
        while not self._ends or self._ends[-1] <= position:
            order = self._arranged(len(self._ends))
            num_positions = 0 if order is None else order.num_positions or 0
            self._ends.append((self._ends[-1] if self._ends else 0) + num_positions)
        return bisect_right(self._ends, position)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop), window after window."""
        while start < stop:
            window = self.window_at(start)
            order, begins = self._arranged(window), self._ends[window - 1] if window else 0
            last = min(self._ends[window], stop)
            assert order is not None, "a position lies in a window that has some"
            yield order.samples(start - begins, last - begins) + window_offset(window)
            start = last


@dataclass(frozen=True)
class StreamSamples:
    """Encoded samples by id; where a window is not at hand any more, it waits until it has been prepared again."""

    windows: Windows

    def __getitem__(self, sample_id: int) -> Features:
        window, index = split_stream_index(sample_id)
        return Features(self.windows.prepared(window)[index].arrays, sample_id)

    def place(self, sample_id: int) -> str:
        """Return where its row stands, as exactly as what is at hand can tell."""
        window, index = split_stream_index(sample_id)
        prepared = self.windows.at_hand(window)
        if prepared is not None:
            return prepared.place(index)
        begins = self.windows.job.plan.place(self.windows.record(window).start)
        return f"sample {index} of window {window} (from {begins} on)"

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, which outlive the samples."""
        return self._recorded(sample_ids, lambda record: record.lengths, np.int64)

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample, which outlive the samples."""
        return self._recorded(sample_ids, lambda record: record.checksums, np.uint64)

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark of what is delivered with each sample next to its own arrays: of nothing."""
        return np.zeros(len(sample_ids), np.uint64)

    def problem(self) -> str | None:
        """Return None: a window is verified when it is opened."""
        return None

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages on samples that were delivered damaged; their windows are prepared again."""
        places = "; ".join(self.place(sample_id) for sample_id in damaged[:MAX_NAMED].tolist())
        windows = sorted({split_stream_index(sample_id)[0] for sample_id in damaged.tolist()})
        gone = [
            window for window in windows if self.windows.at_hand(window) is None
        ]  # a damaged one is set aside by it
        if gone:
            again = f"windows {', '.join(map(str, gone))} are set aside. The same command prepares them again and"
        else:
            again = "and on the disk it is intact: it was damaged in the memory of a process. The same command"
        return f"{places}: not what was prepared", f"{again} continues from the last checkpoint."

    def _recorded(
        self, sample_ids: np.ndarray, read: Callable[[WindowRecord], np.ndarray], dtype: type[np.generic]
    ) -> np.ndarray:
        places = [split_stream_index(sample_id) for sample_id in sample_ids.tolist()]
        found = {window: read(self.windows.record(window)) for window in sorted({window for window, _ in places})}
        return np.array([found[window][index] for window, index in places], dtype)


Log = Callable[[str], None]


def stream_view(
    source: Source,
    encoding: Encoding,
    *,
    seed: int,
    log: Log,
) -> tuple[DatasetView, Streamed]:
    """Return the source's rows as an endless dataset view, and their counts; a process begins to prepare its windows.

    Raises DataError where the cache folder cannot be written; rows that are refused
    raise it when their window is reached, in every process that waits for it.
    """
    stream, section = stream_of(source.section), encoding.section
    assert stream is not None
    plan = StreamPlan(source.shards(), stream.window_rows, seed=seed, shuffle=section.shuffle)
    made_of = identify(source, encoding, stream=_windows_of(source, plan))
    folder = cache_folder(section) / "streams" / folder_name(made_of)
    log_older_versions(folder, key=source.key, log=log)
    job = StreamJob(
        folder=StreamFolder(folder),
        key=source.key,
        plan=plan,
        encoding_plan=encoding.plan(source.format),
        section=section,
        num_ahead=stream.num_ahead,
        made_of=made_of,
    )
    windows = Windows(job, log=log)
    num_before = windows.open()
    for line in _describe_stream(job, num_before=num_before):
        log(line)
    order = StreamOrder(WindowOrders(windows, num_logged=num_before, log=log))
    budget = tokens_per_position(section.batching, max_length=section.longest)
    fingerprint = fingerprint_of(made_of.fingerprint, section.shuffle, section.batching.by, budget)
    return DatasetView(StreamSamples(windows), order, fingerprint), Streamed(partial(_count_so_far, windows))


class WindowOrders:
    """Gives every window the order of an ordinary set, and tells of each that is new what became of its rows."""

    def __init__(self, windows: Windows, *, num_logged: int, log: Log) -> None:
        self._windows = windows
        self._num_logged = num_logged
        self._log = log
        self._num_counted = 0
        self.counts = Counts()  # of all windows that have been arranged

    def __call__(self, window: int) -> Order | None:
        """Return the order of the window, None where no sample is in it; waits until it has been prepared."""
        plan, section = self._windows.job.plan, self._windows.job.section
        record = self._windows.record(window)
        order = None
        if len(record.lengths):
            order = set_order(
                record.lengths,
                seed=derive_seed(plan.seed, "window", window),
                shuffle=section.shuffle,
                batching=section.batching,
                max_length=section.longest,
            )
        if window == self._num_counted:
            self._count(record, order)
        return order

    def _count(self, record: WindowRecord, order: Order | None) -> None:
        """Add the window up; raises DataError when a whole pass has come to nothing."""
        self.counts = self.counts.plus(record.counts)
        self._num_counted += 1
        job = self._windows.job
        if self.counts.samples == 0 and record.next.pass_number > 0:
            raise DataError(
                f"{job.key}: a whole pass over the stream leaves no sample: {'; '.join(self.counts.lines())}."
            )
        if record.window >= self._num_logged:
            batching = job.section.batching
            grouped = () if order is None or batching.by == "samples" else (f"{order.num_positions:,} {batching.unit}",)
            self._log(f"{job.key}: window {record.window}: {'; '.join((*record.counts.lines(), *grouped))}")
            if self._num_counted & (self._num_counted - 1) == 0 and record.window:  # 2, 4, 8, ...: ever more rarely
                self._log(f"{job.key}: {self._num_counted:,} windows so far: {'; '.join(self.counts.lines())}")


def _count_so_far(windows: Windows) -> Counts:
    return total_counts(windows.record(window).counts for window in range(windows.job.folder.num_records()))


def _windows_of(source: Source, plan: StreamPlan) -> Mapping[str, Any]:
    """Return what decides which rows are in which window."""
    seed = plan.seed if plan.shuffle else None
    return {"listing": source.listing_identity(), "window_rows": plan.window_rows, "seed": seed}


def _describe_stream(job: StreamJob, *, num_before: int) -> Iterator[str]:
    """Yield what is to be known of a stream's order, and what is there of it."""
    plan = job.plan
    turn = "in an order drawn for every pass" if plan.shuffle else "in their order"
    mixed = ", shuffled within a window only" if plan.shuffle else ""
    yield (
        f"{job.key}: a stream of {len(plan.shards):,} files or shards {turn}, in windows of {plan.window_rows:,} rows"
        f"{mixed}; prefetched windows: {job.num_ahead}"
    )
    if damaged := job.folder.damaged():
        yield (
            f"warning: {job.key}: {len(damaged)} of its windows or records were damaged and prepared again; they are "
            f"kept in {damaged[0].parent}. Check the disk and the memory of this machine, then delete that folder."
        )
    if num_before:
        yield f"{job.key}: {num_before:,} windows were prepared before; those that are needed are prepared again"
