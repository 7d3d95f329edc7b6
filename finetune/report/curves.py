"""Curves of any length in bounded memory, which keep every extreme, and means for a smoothed line."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_BUCKETS = 1024
"""A long curve has between half as many and this many buckets; a page draws two points and a mean of each."""

_FLUSH_POINTS = 4096

_BUCKET = np.dtype(
    [
        *(("first", "f8"), ("last", "f8"), ("count", "i8"), ("sum", "f8")),
        *(("low_at", "f8"), ("low", "f8"), ("high_at", "f8"), ("high", "f8")),
    ]
)


@dataclass(frozen=True)
class Points:
    """The points to draw: measured extremes in order, and the means of groups of equal size."""

    steps: np.ndarray
    values: np.ndarray
    mean_steps: np.ndarray
    means: np.ndarray
    counts: np.ndarray  # of points in each mean
    width: int  # points per bucket; 1: every point is kept


class Curve:
    """A value by step, in buckets of consecutive points: the minimum, maximum and mean of each.

    Pairs of buckets are merged when there are too many. Values that are not finite are only counted.
    """

    def __init__(self) -> None:
        self.num_not_finite = 0
        self._buckets = np.empty(0, _BUCKET)
        self._width = 1
        self._steps: list[float] = []  # of points that do not yet fill a bucket
        self._values: list[float] = []

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        """Add points with increasing steps, after all earlier ones."""
        self._steps.extend(steps)
        self._values.extend(values)
        if len(self._steps) >= _FLUSH_POINTS:
            self._flush()

    def cut_after(self, step: float) -> None:
        """Remove the points after the step, which will be repeated, and the whole bucket that contains it."""
        self._flush()
        count = sum(number <= step for number in self._steps)
        del self._steps[count:], self._values[count:]
        self._buckets = self._buckets[self._buckets["last"] <= step]

    def points(self) -> Points:
        """Return the points to draw."""
        self._flush()
        buckets = np.concatenate([self._buckets, _make_buckets(self._steps, self._values, self._width)])
        low, high = (buckets["low_at"], buckets["low"]), (buckets["high_at"], buckets["high"])
        is_rising = low[0] <= high[0]
        (first_at, first), (then_at, then) = (
            (np.where(is_rising, *pair) for pair in zip(*sides, strict=True)) for sides in ((low, high), (high, low))
        )
        steps, values = np.stack([first_at, then_at], 1).ravel(), np.stack([first, then], 1).ravel()
        is_new = np.ones(len(steps), bool)
        is_new[1::2] = first_at != then_at
        middle = (buckets["first"] + buckets["last"]) / 2
        means = buckets["sum"] / buckets["count"]
        return Points(steps[is_new], values[is_new], middle, means, buckets["count"], self._width)

    def _flush(self) -> None:
        steps, values = np.asarray(self._steps, float), np.asarray(self._values, float)
        is_finite = np.isfinite(values)
        self.num_not_finite += int(len(values) - is_finite.sum())
        steps, values = steps[is_finite], values[is_finite]
        full = len(steps) - len(steps) % self._width
        self._buckets = np.concatenate([self._buckets, _make_buckets(steps[:full], values[:full], self._width)])
        self._steps, self._values = steps[full:].tolist(), values[full:].tolist()
        while len(self._buckets) > MAX_BUCKETS:
            starts = np.arange(0, len(self._buckets) - 1, 2)  # an odd last bucket joins the last pair
            self._buckets = _reduced(self._buckets, starts)
            self._width *= 2


def _make_buckets(steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Return buckets of `width` points; the last one may have fewer."""
    buckets = np.empty(len(steps), _BUCKET)
    for name in ("first", "last", "low_at", "high_at"):
        buckets[name] = steps
    for name in ("sum", "low", "high"):
        buckets[name] = values
    buckets["count"] = 1
    starts = np.arange(0, len(buckets), width)
    return buckets if width == 1 else _reduced(buckets, starts)


def _reduced(buckets: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the buckets merged from each start to the next."""
    if not len(buckets):
        return buckets
    ends = np.append(starts[1:], len(buckets))
    owner = np.repeat(np.arange(len(starts)), ends - starts)
    merged = np.empty(len(starts), _BUCKET)
    merged["first"], merged["last"] = buckets["first"][starts], buckets["last"][ends - 1]
    merged["count"] = np.add.reduceat(buckets["count"], starts)
    merged["sum"] = np.add.reduceat(buckets["sum"], starts)
    for side, sign in (("low", 1), ("high", -1)):
        order = np.lexsort((sign * buckets[side], owner))[starts]  # the smallest of each owner is first
        merged[side], merged[f"{side}_at"] = buckets[side][order], buckets[f"{side}_at"][order]
    return merged
