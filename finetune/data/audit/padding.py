"""The share of padding in the forward pass, measured on the first batches of the order."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.dataset_view import DatasetView
from finetune.data.order.order import permutation

MAX_MEASURED_SAMPLES = 4096
"""The number of samples after which the share is accurate enough."""


@dataclass(frozen=True)
class Padding:
    """The measured batches, compared with plain padded batches of the same samples."""

    num_batches: int
    num_samples: int
    tokens: int
    computed: int  # positions of these batches, padding included
    plain_computed: int  # positions of plain batches, `train.microbatch_size` samples each, in random order
    num_positions: int  # of the order
    budget: int | None  # tokens per position; None if a position holds one sample

    @property
    def filled(self) -> float | None:
        """Return the mean fill of the packs or token batches; None without a budget."""
        return self.tokens / (self.num_positions * self.budget) if self.budget and self.num_positions else None

    @property
    def share(self) -> float:
        """Return the share of padding in the computed positions."""
        return 1 - self.tokens / self.computed if self.computed else 0.0

    @property
    def plain_share(self) -> float:
        """Return the share of padding of plain padded batches."""
        return 1 - self.tokens / self.plain_computed if self.plain_computed else 0.0

    @property
    def saved(self) -> float:
        """Return the share of the positions of plain batches that is saved."""
        return 1 - self.computed / self.plain_computed if self.plain_computed else 0.0


def measure_padding(
    view: DatasetView,
    collate: Callable[[Sequence[Features]], Batch],
    *,
    global_batch_size: int,
    microbatch_size: int,
    budget: int | None = None,
) -> Padding:
    """Return the padding of the order's first steps: at least one step, at most an epoch."""
    num_batches = num_positions = computed = tokens = 0
    lengths: list[int] = []
    for ids in _first_batches(view, global_batch_size=global_batch_size, microbatch_size=microbatch_size):
        batch = collate([view.samples[sample_id] for sample_id in ids.tolist()])
        num_batches, num_positions = num_batches + 1, num_positions + microbatch_size
        has_all_lengths = len(batch.lengths) == len(ids)  # the encoder of a seq2seq model reads the source only
        lengths.extend(batch.lengths if has_all_lengths else view.samples.lengths_of(ids).tolist())
        tokens += sum(batch.lengths) if has_all_lengths else batch.num_tokens
        computed += math.prod(batch.positions)
    plain = plain_computed(np.array(lengths, np.int64), microbatch_size=microbatch_size)
    return Padding(num_batches, len(lengths), tokens, computed, plain, num_positions, budget)


def plain_computed(lengths: np.ndarray, *, microbatch_size: int) -> int:
    """Return the positions of padded batches of these samples in random order."""
    shuffled = lengths[permutation(len(lengths), "plain")]
    starts = np.arange(0, len(lengths), microbatch_size)
    sizes = np.minimum(microbatch_size, len(lengths) - starts)
    return int((np.maximum.reduceat(shuffled, starts) * sizes).sum())


def _first_batches(view: DatasetView, *, global_batch_size: int, microbatch_size: int) -> Iterator[np.ndarray]:
    start = seen = 0
    last = view.order.num_positions or 0
    while start == 0 or (seen < MAX_MEASURED_SAMPLES and start + global_batch_size <= last):
        for ids in view.order.cut(start, start + global_batch_size, microbatch_size):
            seen += len(ids)
            yield ids
        start += global_batch_size
