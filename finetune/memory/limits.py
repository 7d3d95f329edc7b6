"""The trial of a microbatch size: the batch that needs the most memory, and the limits and peaks of a rank.

Most memory is needed by the batch with the most positions, including padding. The limit is a GPU's, or of resident
memory and data segment of a process.
"""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import BatchingSection
from finetune.data.batch import Batch
from finetune.data.loader import training_batch
from finetune.data.order.order import DatasetView, LengthGroupedOrder
from finetune.runtime.resources import available_bytes, resident_bytes
from finetune.task.model_inputs import is_padding_free
from finetune.task.protocol import Task

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of this process."""

    name: str  # for messages
    limit: int  # bytes of this process, including those in use
    used: Callable[[], int]
    start: Callable[[], Callable[[], int]]
    """Starts a measurement and returns a function for its peak, in total bytes."""


def memories(device: torch.device) -> tuple[MemoryLimit, ...]:
    """Return the memory limits of this rank; none if the device has no counters."""
    if device.type == "cpu":
        free = available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # shared equally by a machine's ranks
        resident = MemoryLimit("memory", resident_bytes() + free, resident_bytes, _resident_peak)
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit == resource.RLIM_INFINITY or not _status("VmData"):
            return (resident,)
        size = partial(_status, "VmData")  # a peak, since malloc keeps freed memory
        return resident, MemoryLimit("data segment (ulimit -d)", limit, size, lambda: size)
    if device.type != "cuda":
        return ()
    # torch may allocate the free memory, and that which it has reserved
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    limit = min(free + torch.cuda.memory_reserved(device), int(share * total))
    used = partial(torch.cuda.memory_allocated, device)
    return (MemoryLimit("GPU memory", limit, used, partial(_device_peak, device)),)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error comes from an allocator of a device or of the host."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY_TEXTS)
    )


_OUT_OF_MEMORY_TEXTS = (
    *("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory"),
    "CUBLAS_STATUS_ALLOC_FAILED",  # of a matrix product's workspace
)


def release_freed_memory() -> None:
    """Make glibc return freed memory to the system, so that it does not count as used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _device_peak(device: torch.device) -> Callable[[], int]:
    """Reset the peak: the caller has saved the counter."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)

    def peak() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return peak


def _resident_peak() -> Callable[[], int]:
    """If the peak of the process has not grown, the current resident memory counts, since malloc keeps freed memory.

    The kernel's counter is not reset, because a run reports it.
    """
    before = _peak_resident()

    def peak() -> int:
        after = _peak_resident()
        return after if after > before else resident_bytes()

    return peak


def _peak_resident() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes; 0 if it is missing."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(values[0]) if values else 0


MARGIN = 0.1
"""Share of the free memory that stays free, since batches of other shapes fragment it."""

MAX_GROWTH = 4
"""Maximum ratio of the next size to the largest measured one, unless the sizes to choose from grow faster."""

Peaks = tuple[int, ...]
"""The peak of each kind of memory on each rank, always in the same order."""


Measured = Mapping[int, Peaks | None]
"""The peaks by tried size; None if it ran out of memory."""


@dataclass(frozen=True)
class MemoryLimits:
    """The memory of all ranks: used by weights, gradients and states, and the limits."""

    used: Peaks
    limits: Peaks

    @property
    def targets(self) -> Peaks:
        """Return the limits minus the margin."""
        return tuple(
            int(limit - MARGIN * max(0, limit - used)) for used, limit in zip(self.used, self.limits, strict=True)
        )

    def holds(self, peaks: Peaks) -> bool:
        """Return whether the peaks leave the margin free on every rank."""
        return all(peak <= target for peak, target in zip(peaks, self.targets, strict=True))

    def next_size(self, sizes: Sequence[int], measured: Measured) -> int | None:
        """Return the next of the ascending sizes to try; None once the largest that fits is known."""
        if not measured:
            return sizes[0]
        top = self.largest_fitting(measured)
        if top is None:
            return None
        too_large = min((size for size in measured if size > top), default=sizes[-1] + 1)
        larger = [size for size in sizes if top < size < too_large]
        options = [size for size in larger if size <= MAX_GROWTH * top] or larger[:1]
        fitting = [size for size in options if self.holds(self.predict(size, measured))]
        return max(fitting, default=None)

    def largest_fitting(self, measured: Measured) -> int | None:
        """Return the largest size that was measured to fit."""
        return max((size for size, peaks in measured.items() if peaks is not None and self.holds(peaks)), default=None)

    def predict(self, size: int, measured: Measured) -> Peaks:
        """Return the expected peaks of a size that is larger than the measured ones."""
        known = sorted((size, peaks) for size, peaks in measured.items() if peaks is not None)
        sizes = [size for size, _ in known]
        predicted = []
        for peaks, base in zip(zip(*(peaks for _, peaks in known), strict=True), self.used, strict=True):
            slopes = [(high - low) / (b - a) for (a, low), (b, high) in pairwise(zip(sizes, peaks, strict=True))]
            steepest = max(slopes, default=0.0)
            if steepest <= 0:
                predicted.append(base + max(0, peaks[-1] - base) * size // sizes[-1])
                continue
            if len(slopes) > 1 and slopes[-1] > _CURVED * slopes[-2]:
                # the slope of the next segment of a parabola, relative to this one
                quadratic = (size + sizes[-1]) / (sizes[-1] + sizes[-2])
                steepest = max(steepest, slopes[-1] * quadratic)
            predicted.append(int(peaks[-1] + steepest * (size - sizes[-1])))
        return tuple(predicted)


_CURVED = 1.2
"""Ratio of slopes above which memory is not linear: attention may be quadratic in the length."""


MAX_POSITIONS = 1 << 22
"""Maximum number of positions to search if a position is one sample; of longer runs the first ones are searched."""

MAX_GROUPED_POSITIONS = 1 << 14
"""The same if a position is a pack: all packs are nearly full."""

_NUM_COLLATED = 3
_CHUNK_POSITIONS = 1 << 18


@dataclass(frozen=True)
class LongestBatch:
    """The microbatch with the most positions, and its step."""

    batch: Batch
    step: int  # counts from 1
    is_of_all: bool  # every microbatch of the run was searched

    @property
    def num_positions(self) -> int:
        """Return the number of positions in its forward pass, including padding."""
        rows, length = self.batch.positions
        return rows * length

    def format(self) -> str:
        """Return its size: `4 samples, the longest of 96 tokens, 384 positions with padding`."""
        num, rows = len(self.batch.sample_ids), self.batch.positions[0]
        longest = max(self.batch.lengths, default=0)
        layout = "in one row" if rows == 1 and num > 1 else "with padding"
        samples = f"{num} sample{'s' * (num > 1)}, the longest of {longest:,} tokens"
        return f"{samples}, {self.num_positions:,} positions {layout}"


def find_longest_batch(
    config: RunConfig,
    view: DatasetView,
    task: Task,
    *,
    batching: BatchingSection,
    microbatch_size: int,
    steps: range,
) -> LongestBatch:
    """Return the longest microbatch of these steps, on the host; the same on every rank.

    `batching` is the job's section with `auto` values resolved.
    """
    is_row = is_padding_free(batching)
    by_samples, batch_size = config.data.batching.by == "samples", config.train.global_batch_size
    max_steps = max(1, (MAX_POSITIONS if by_samples else MAX_GROUPED_POSITIONS) // batch_size)
    searched = steps[: 1 if view.order.num_positions is None else max_steps]  # a stream's later rows are not known yet
    scan = _longest_of_samples if by_samples else _longest_of_groups
    candidates = scan(view, searched, microbatch_size, batch_size, is_row)
    num = _NUM_COLLATED if task.samples.loading_cost == "light" else 1
    batches = [
        LongestBatch(
            training_batch(
                view,
                task.collate,
                ids,
                step=step,
                seed=config.run.seed,
                has_partners=task.samples.has_partners,
            ),
            step + 1,
            is_of_all=len(searched) == len(steps),
        )
        for step, ids in candidates[:num]
    ]
    return max(batches, key=lambda longest: (longest.num_positions, longest.batch.num_tokens))


Candidates = list[tuple[int, np.ndarray]]
"""Steps, counted from 0, with the sample ids of one microbatch each, longest first."""


def _longest_of_samples(view: DatasetView, steps: range, size: int, global_batch_size: int, is_row: bool) -> Candidates:
    """Return the longest microbatches if a position is one sample.

    Sorting by length keeps every sample in its window, so the windows with the longest samples are known without it.
    """
    order, start, stop = view.order, steps.start * global_batch_size, steps.stop * global_batch_size
    if not isinstance(order, LengthGroupedOrder):
        return _best(_scored(view, start, stop, size, is_row), global_batch_size)
    window = order.window_positions
    first = start // window * window
    end = first + len(range(first, stop, window)) * window
    chunk = max(1, _CHUNK_POSITIONS // window) * window
    tops: list[tuple[int, int]] = []  # the longest sample of each window, and its start
    for chunk_start in range(first, end, chunk):
        ids = order.unsorted.samples(chunk_start, min(chunk_start + chunk, end))
        longest = view.samples.lengths_of(ids).reshape(-1, window).max(axis=1)
        tops += [(int(length), chunk_start + number * window) for number, length in enumerate(longest)]
    candidates = [
        scored
        for _, window_start in sorted(tops, reverse=True)[:_NUM_COLLATED]
        for scored in _scored(view, max(start, window_start), min(stop, window_start + window), size, is_row)
    ]
    return _best(iter(candidates), global_batch_size)


def _scored(
    view: DatasetView, start: int, stop: int, size: int, is_row: bool
) -> Iterator[tuple[tuple[int, int], int, np.ndarray]]:
    """Yield the longest microbatches at these positions: their lengths, position and sample ids."""
    chunk = max(1, _CHUNK_POSITIONS // size) * size
    for chunk_start in range(start, stop, chunk):
        ids = view.order.samples(chunk_start, min(chunk_start + chunk, stop)).reshape(-1, size)
        lengths = view.samples.lengths_of(ids.reshape(-1)).reshape(ids.shape).astype(np.int64)
        longest, total = lengths.max(axis=1), lengths.sum(axis=1)
        keys = (longest, total) if is_row else (total, longest)  # lexsort's primary key is the last one
        for row in np.lexsort(keys)[-_NUM_COLLATED:]:
            yield (int(keys[1][row]), int(keys[0][row])), chunk_start + int(row) * size, ids[row]


def _longest_of_groups(view: DatasetView, steps: range, size: int, global_batch_size: int, is_row: bool) -> Candidates:
    """Return the longest microbatches if a position holds several samples."""
    start, stop = steps.start * global_batch_size, steps.stop * global_batch_size
    scored = []
    for number, ids in enumerate(view.order.cut(start, stop, size)):
        lengths = view.samples.lengths_of(ids)
        longest = int(lengths.max())
        total = int(lengths.sum()) if is_row else longest * len(lengths)
        scored.append(((total, longest), start + number * size, ids))
    return _best(iter(scored), global_batch_size)


def _best(scored: Iterator[tuple[tuple[int, int], int, np.ndarray]], global_batch_size: int) -> Candidates:
    ranked = sorted(scored, key=lambda candidate: (candidate[0], -candidate[1]), reverse=True)
    return [(position // global_batch_size, ids) for _, position, ids in ranked[:_NUM_COLLATED]]
