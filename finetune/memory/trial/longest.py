"""The microbatch of a run that needs the most memory: the one with the most positions, including padding."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import BatchingSection
from finetune.data.batch import Batch
from finetune.data.loader import training_batch
from finetune.data.order.grouping import LengthGroupedOrder
from finetune.data.order.order import DatasetView
from finetune.task.model_inputs import is_padding_free
from finetune.task.protocol import Task

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
    searched = _searched(config, view, steps)
    by_samples = config.data.batching.by == "samples"
    scan = _longest_of_samples if by_samples else _longest_of_groups
    candidates = scan(view, searched, microbatch_size, config.train.global_batch_size, is_row)
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


def _searched(config: RunConfig, view: DatasetView, steps: range) -> range:
    """Return the steps to search; only the first for a stream, whose rows are not available yet."""
    if view.order.num_positions is None:
        return steps[:1]
    max_positions = MAX_POSITIONS if config.data.batching.by == "samples" else MAX_GROUPED_POSITIONS
    return steps[: max(1, max_positions // config.train.global_batch_size)]


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
    tops = [
        (int(lengths.max()), first + number * window)
        for number, lengths in enumerate(_windows_of_lengths(order, view, range(first, stop, window)))
    ]
    candidates = [
        scored
        for _, window_start in sorted(tops, reverse=True)[:_NUM_COLLATED]
        for scored in _scored(view, max(start, window_start), min(stop, window_start + window), size, is_row)
    ]
    return _best(iter(candidates), global_batch_size)


def _windows_of_lengths(order: LengthGroupedOrder, view: DatasetView, starts: range) -> Iterator[np.ndarray]:
    """Yield the lengths of each window's samples, before sorting."""
    num_windows = max(1, _CHUNK_POSITIONS // starts.step)
    for start in range(starts.start, starts.stop, num_windows * starts.step):
        end = min(start + num_windows * starts.step, starts.start + len(starts) * starts.step)
        lengths = view.samples.lengths_of(order.unsorted.samples(start, end))
        yield from lengths.reshape(-1, starts.step)


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
    return _best(
        (
            (_length_of_group(view.samples.lengths_of(ids), is_row), start + number * size, ids)
            for number, ids in enumerate(view.order.cut(start, stop, size))
        ),
        global_batch_size,
    )


def _length_of_group(lengths: np.ndarray, is_row: bool) -> tuple[int, int]:
    longest = int(lengths.max())
    return (int(lengths.sum()), longest) if is_row else (longest * len(lengths), longest)


def _best(scored: Iterator[tuple[tuple[int, int], int, np.ndarray]], global_batch_size: int) -> Candidates:
    ranked = sorted(scored, key=lambda candidate: (candidate[0], -candidate[1]), reverse=True)
    return [(position // global_batch_size, ids) for _, position, ids in ranked[:_NUM_COLLATED]]
