"""Samples sorted by length within a few steps, so that those which share a forward pass need little padding."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np

from finetune.data.order.order import LengthsOf, Order, OrderOfPieces, joined, permutation


class ByLength(OrderOfPieces):
    """An order whose samples are sorted by length within every window of so many steps.

    In a window of one step each step keeps its samples, so its loss is the same. In a larger one the steps get samples
    of similar lengths and are shuffled. No sample leaves its epoch.
    """

    def __init__(
        self, order: Order, lengths_of: LengthsOf, *, seed: int, global_batch_size: int, window_steps: int
    ) -> None:
        self._order = order
        self._lengths_of = lengths_of
        self._seed = seed
        self._step_size = global_batch_size
        self._window_size = global_batch_size * window_steps
        self._sorted = lru_cache(maxsize=2)(self._sorted_anew)

    @property
    def num_positions(self) -> int | None:
        """Return those of the order that is sorted."""
        return self._order.num_positions

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop)."""
        while start < stop:
            window, first = divmod(start, self._window_size)
            last = min(self._window_size, first + stop - start)
            yield self._sorted(window)[first:last]
            start += last - first

    def _sorted_anew(self, window: int) -> np.ndarray:
        start, stop = window * self._window_size, (window + 1) * self._window_size
        ends = _multiples(self._order.num_positions, start, stop) if self._order.num_positions else []
        edges = [start, *ends, stop]
        return joined(self._of_one_epoch(*edge) for edge in pairwise(edges))

    def _of_one_epoch(self, start: int, stop: int) -> np.ndarray:
        ids = self._order.samples(start, stop)
        ids = ids[np.argsort(-self._lengths_of(ids), kind="stable")]
        edges = [start, *_multiples(self._step_size, start, stop), stop]
        turn = permutation(len(edges) - 1, self._seed, "lengths", start)  # which part of the sorted samples comes next
        sizes = np.empty_like(turn)
        sizes[turn] = np.diff(edges)
        parts = np.split(ids, np.cumsum(sizes)[:-1])
        return joined(parts[number] for number in turn)


class LongestFirst(OrderOfPieces):
    """The samples of a set from the longest to the shortest, for what depends on no order."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._ids = np.argsort(-np.asarray(lengths, np.int64), kind="stable")

    @property
    def num_positions(self) -> int:
        """Return the number of samples: each is one position."""
        return len(self._ids)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop) of the one epoch that there is."""
        yield self._ids[start:stop]


def _multiples(of: int, start: int, stop: int) -> list[int]:
    """Return the multiples of a number strictly between start and stop."""
    return list(range((start // of + 1) * of, stop, of))
