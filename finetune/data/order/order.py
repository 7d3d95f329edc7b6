"""The order of samples as a pure function of (seed, epoch, position); a position counts over the whole world."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from finetune.runtime.seeds import derive_seed

LengthsOf = Callable[[np.ndarray], np.ndarray]
"""From sample ids to the tokens of each."""


class Order(Protocol):
    """An endless sequence of positions, each of which holds one or more samples; a pure function of the position."""

    @property
    def num_positions(self) -> int | None:
        """Return the positions of one epoch; None where nobody knows, as in a stream."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids (int64) of all samples at positions [start, stop), position after position."""

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the same in pieces of `size` positions each: what the microbatches hold."""


class PiecewiseOrder(ABC):
    """What orders share that come piece by piece: window after window, epoch after epoch."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of all samples at positions [start, stop), position after position."""
        return concatenated(self.pieces(start, stop))

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the samples of `size` positions at a time, where a position may hold several."""
        return (self.samples(first, min(first + size, stop)) for first in range(start, stop, size))

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop), as they come."""


@dataclass(frozen=True)
class SetOrder(PiecewiseOrder):
    """An endless sequence of sample ids, epoch after epoch, each of which holds every sample once."""

    seed: int
    num_samples: int
    shuffle: bool = True

    @property
    def num_positions(self) -> int:
        """Return the number of samples: each is one position."""
        return self.num_samples

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the sample ids at positions [start, stop), epoch after epoch."""
        while start < stop:
            epoch, first = divmod(start, self.num_samples)
            last = min(self.num_samples, first + stop - start)
            yield self._epoch(epoch)[first:last]
            start += last - first

    def _epoch(self, epoch: int) -> np.ndarray:
        return _permutation(self.seed, self.num_samples, epoch) if self.shuffle else _sequence(self.num_samples)


def steps_for_tokens(
    order: Order, lengths_of: LengthsOf, *, epoch_tokens: int | None, global_batch_size: int, tokens: int
) -> int:
    """Return the fewest optimizer steps, from the first, whose samples have at least `tokens` (>= 1) together.

    `epoch_tokens` spares counting whole epochs, where each holds the same samples; None where they may differ.
    """
    start, missing = 0, tokens
    if epoch_tokens is not None and order.num_positions is not None:
        whole_epochs, rest = divmod(tokens - 1, epoch_tokens)
        start = whole_epochs * order.num_positions // global_batch_size * global_batch_size
        seen_already = order.samples(start, whole_epochs * order.num_positions)
        missing = rest + 1 + int(lengths_of(seen_already).sum())
    while missing > 0:
        missing -= int(lengths_of(order.samples(start, start + global_batch_size)).sum())
        start += global_batch_size
    return start // global_batch_size


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """Return a permutation that follows from the parts, of the raw bits of PCG64 (NEP 19: no NumPy changes them)."""
    return np.concatenate(shuffled_rows(1, size, *parts))


def shuffled_rows(num_rows: int, size: int, *parts: int | str) -> np.ndarray:
    """Return this number of permutations, one a row, that follow from the parts together."""
    bits = np.random.PCG64(derive_seed(*parts)).random_raw(num_rows * size).reshape(num_rows, size)
    return np.argsort(bits, kind="stable").astype(np.int64)


def concatenated(pieces: Iterator[np.ndarray]) -> np.ndarray:
    """Return the ids of all pieces in one array of one's own; there may be none."""
    return np.concatenate([np.zeros(0, np.int64), *pieces])


@lru_cache(maxsize=2)
def _permutation(seed: int, num_samples: int, epoch: int) -> np.ndarray:
    return _frozen(permutation(num_samples, seed, "order", epoch))


@lru_cache(maxsize=2)
def _sequence(num_samples: int) -> np.ndarray:
    return _frozen(np.arange(num_samples, dtype=np.int64))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
