"""Several pools as one: which source stands at which position is a pure function of the seed and the position."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from finetune.data.order.order import Order, OrderOfPieces, shuffled_rows
from finetune.data.order.sample_ids import of_source

_POSITIONS_DRAWN_AT_ONCE = 1024


class MixedOrder(OrderOfPieces):
    """An endless order of windows, in each of which every source has its count of positions, shuffled.

    What stands there is the next position of the source's own order, so each source is gone through in that order.
    Ids are those of `data/order/sample_ids.py`.
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], *, seed: int, until: str | None) -> None:
        self._orders = orders
        self._counts = np.array(counts, np.int64)
        self._seed = seed
        self.window_size = int(self._counts.sum())
        self._windows_at_once = max(1, _POSITIONS_DRAWN_AT_ONCE // self.window_size)
        self._block = lru_cache(maxsize=2)(self._drawn_block)
        self._num_positions = self.window_size if until is None else self._used_up(until)

    @property
    def num_positions(self) -> int | None:
        """Return the positions until the first source, or the last, is used up; without weights, those of a window."""
        return self._num_positions

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop): at once where each holds one sample, else position by position."""
        sources, draws = self._draws(start, stop)
        taken = {int(source): _span(draws[sources == source]) for source in np.unique(sources)}
        ids = {source: self._orders[source].samples(*span) + of_source(source) for source, span in taken.items()}
        if sum(map(len, ids.values())) == len(sources):
            mixed = np.empty(len(sources), np.int64)
            for source, of_its in ids.items():
                mixed[sources == source] = of_its
            yield mixed
            return
        each = {source: self._orders[source].cut(*span, 1) for source, span in taken.items()}
        yield from (next(each[source]) + of_source(source) for source in sources.tolist())

    def num_draws(self, num_positions: int) -> list[int]:
        """Return how many of the first so many positions each source has."""
        windows, rest = divmod(num_positions, self.window_size)
        sources, _ = self._draws(num_positions - rest, num_positions)
        counts = windows * self._counts + np.bincount(sources, minlength=len(self._counts))
        return [int(count) for count in counts]

    def _draws(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each position its source and which of that source's positions it is."""
        sources, draws = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        size = self._windows_at_once * self.window_size
        while start < stop:
            block, first = divmod(start, size)
            last = min(size, first + stop - start)
            of_block, rank = self._block(block)
            sources.append(of_block[first:last])
            draws.append(rank[first:last] + block * self._windows_at_once * self._counts[sources[-1]])
            start += last - first
        return np.concatenate(sources), np.concatenate(draws)

    def _drawn_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position in the block, and how many of that source stand before it in the block."""
        of_window = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = of_window[shuffled_rows(self._windows_at_once, self.window_size, self._seed, "mix", block)].ravel()
        rank = np.empty_like(sources)
        for source in range(len(self._counts)):
            here = np.flatnonzero(sources == source)
            rank[here] = np.arange(len(here))
        return sources, rank

    def _used_up(self, until: str) -> int | None:
        """Return the positions after which the first source has been gone through once, or the last."""
        sizes = [order.num_positions for order in self._orders]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        ends = [self._position_of(source, size - 1) + 1 for source, size in enumerate(known)]
        return min(ends) if until == "first" else max(ends)

    def _position_of(self, source: int, draw: int) -> int:
        window, rest = divmod(draw, int(self._counts[source]))
        start = window * self.window_size
        sources, _ = self._draws(start, start + self.window_size)
        return start + int(np.flatnonzero(sources == source)[rest])


def _span(draws: np.ndarray) -> tuple[int, int]:
    """Return where these draws, which follow one another, begin and end."""
    return int(draws[0]), int(draws[-1]) + 1
