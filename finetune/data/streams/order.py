"""The order of a stream: window after window, and within each the order of an ordinary set."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from finetune.data.order.order import Order, OrderOfPieces
from finetune.data.order.sample_ids import of_window

_KEPT_ORDERS = 4


class StreamOrder(OrderOfPieces):
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
            yield order.samples(start - begins, last - begins) + of_window(window)
            start = last
