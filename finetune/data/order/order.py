"""The order of samples as a pure function of (seed, epoch, position); a position counts over the whole world."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from finetune.runtime.seeds import derive_seed

LengthsOf = Callable[[np.ndarray], np.ndarray]
"""From sample ids to the number of tokens of each."""


class Order(Protocol):
    """An endless sequence of positions with one or more samples each; a pure function of the position."""

    @property
    def num_positions(self) -> int | None:
        """Return the number of positions of one epoch; None if it is unknown, as for a stream."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids (int64) of all samples at positions [start, stop), in the order of the positions."""

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the same ids in pieces of `size` positions each: the contents of the microbatches."""


class PiecewiseOrder(ABC):
    """Base of orders that are computed piece by piece: window by window or epoch by epoch."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of all samples at positions [start, stop), in the order of the positions."""
        return concatenated(self.pieces(start, stop))

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the ids of `size` positions at a time; a position may hold several samples."""
        return (self.samples(first, min(first + size, stop)) for first in range(start, stop, size))

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop) in pieces of any size."""


@dataclass(frozen=True)
class SetOrder(PiecewiseOrder):
    """An endless sequence of sample ids; each epoch contains every sample once."""

    seed: int
    num_samples: int
    shuffle: bool = True

    @property
    def num_positions(self) -> int:
        """Return the number of samples; each is one position."""
        return self.num_samples

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the sample ids at positions [start, stop), epoch by epoch."""
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
    """Return the smallest number of optimizer steps whose samples have at least `tokens` (>= 1) tokens in total.

    With `epoch_tokens`, whole epochs are not counted sample by sample; None if epochs may differ.
    """
    start, missing = 0, tokens
    if epoch_tokens is not None and order.num_positions is not None:
        whole_epochs, rest = divmod(tokens - 1, epoch_tokens)
        start = whole_epochs * order.num_positions // global_batch_size * global_batch_size
        earlier = order.samples(start, whole_epochs * order.num_positions)
        missing = rest + 1 + int(lengths_of(earlier).sum())
    while missing > 0:
        missing -= int(lengths_of(order.samples(start, start + global_batch_size)).sum())
        start += global_batch_size
    return start // global_batch_size


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """Return a permutation derived from the parts, using raw bits of PCG64, which are stable across NumPy (NEP 19)."""
    return np.concatenate(shuffled_rows(1, size, *parts))


def shuffled_rows(num_rows: int, size: int, *parts: int | str) -> np.ndarray:
    """Return `num_rows` permutations, one per row, derived from the parts."""
    bits = np.random.PCG64(derive_seed(*parts)).random_raw(num_rows * size).reshape(num_rows, size)
    return np.argsort(bits, kind="stable").astype(np.int64)


def concatenated(pieces: Iterator[np.ndarray]) -> np.ndarray:
    """Return the ids of all pieces in one new array; there may be no pieces."""
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
