"""The microbatch size that fits, as a pure function of the memory that smaller ones have taken.

Memory is close to affine in the microbatch size: a constant, and an amount per sample. From one measured
size the rest is extrapolated in proportion, from two or more along the steepest line between neighbors, or along a
parabola where the lines become steeper. A size is tried only where it is predicted to fit on every rank: a rank that
runs out of memory within a collective would leave the others waiting, and a Linux machine kills a process rather than
refuse it memory. All ranks are given the same numbers, so they agree without a vote; the rank with the least
memory decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MARGIN = 0.1
"""Share of the free memory that stays free: batches of other shapes leave gaps between blocks."""

MAX_GROWTH = 4
"""The most by which a size that is tried next exceeds the largest that was measured, unless sizes lie further apart."""

Peaks = tuple[int, ...]
"""The peak of each kind of memory on each rank, always in the same order."""


@dataclass(frozen=True)
class MemoryLimits:
    """The memory of all ranks: what any size takes at least (weights, gradients, states), and what may be used."""

    used: Peaks
    limits: Peaks

    @property
    def targets(self) -> Peaks:
        """Return the limits less the margin."""
        return tuple(
            int(limit - MARGIN * max(0, limit - used)) for used, limit in zip(self.used, self.limits, strict=True)
        )

    def holds(self, peaks: Peaks) -> bool:
        """Return whether the peaks leave the margin free on every rank."""
        return all(peak <= target for peak, target in zip(peaks, self.targets, strict=True))


Measured = Mapping[int, Peaks | None]
"""By size that was tried: its peaks; None where it was out of memory."""


def next_size(sizes: Sequence[int], measured: Measured, limits: MemoryLimits) -> int | None:
    """Return which of the ascending sizes to try next; None where the largest that fits is known."""
    if not measured:
        return sizes[0]
    top = largest_fitting(measured, limits)
    if top is None:
        return None
    too_large = min((size for size in measured if size > top), default=sizes[-1] + 1)
    larger = [size for size in sizes if top < size < too_large]
    options = [size for size in larger if size <= MAX_GROWTH * top] or larger[:1]
    fitting = [size for size in options if limits.holds(predict(size, measured, limits))]
    return max(fitting, default=None)


def largest_fitting(measured: Measured, limits: MemoryLimits) -> int | None:
    """Return the largest size that was measured to fit."""
    return max((size for size, peaks in measured.items() if peaks is not None and limits.holds(peaks)), default=None)


def predict(size: int, measured: Measured, limits: MemoryLimits) -> Peaks:
    """Return the expected peaks of a size that is larger than the measured ones."""
    known = sorted((size, peaks) for size, peaks in measured.items() if peaks is not None)
    of_each = zip(*(peaks for _, peaks in known), strict=True)
    sizes = [size for size, _ in known]
    return tuple(
        _extrapolated(size, sizes, values, base=base) for values, base in zip(of_each, limits.used, strict=True)
    )


def _extrapolated(size: int, sizes: Sequence[int], peaks: Sequence[int], *, base: int) -> int:
    slopes = [(high - low) / (b - a) for (a, low), (b, high) in pairwise(zip(sizes, peaks, strict=True))]
    steepest = max(slopes, default=0.0)
    if steepest <= 0:
        return base + max(0, peaks[-1] - base) * size // sizes[-1]
    if len(slopes) > 1 and slopes[-1] > _CURVED * slopes[-2]:
        quadratic = (size + sizes[-1]) / (sizes[-1] + sizes[-2])  # how much steeper the next piece of a parabola is
        steepest = max(steepest, slopes[-1] * quadratic)
    return int(peaks[-1] + steepest * (size - sizes[-1]))


_CURVED = 1.2
"""Slopes that differ by more are not those of a line: attention may need a square of the length."""
