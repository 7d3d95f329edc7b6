"""The microbatch size that fits, as a pure function of the measured memory of smaller ones.

Memory is nearly affine in the microbatch size: a constant, and an amount per sample. One measured size is extrapolated
proportionally, two or more along the steepest line between neighbors, or along a parabola if the slope increases. A
size is tried only if it is predicted to fit on every rank: a rank that runs out of memory within a collective would
leave the others waiting, and Linux kills a process instead of refusing an allocation. All ranks have the same numbers,
so they agree without communication; the rank with the least memory decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MARGIN = 0.1
"""Share of the free memory that stays free, since batches of other shapes fragment it."""

MAX_GROWTH = 4
"""Maximum ratio of the next size to the largest measured one, unless sizes lie further apart."""

Peaks = tuple[int, ...]
"""The peak of each kind of memory on each rank, always in the same order."""


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


Measured = Mapping[int, Peaks | None]
"""The peaks by tried size; None if it ran out of memory."""


def next_size(sizes: Sequence[int], measured: Measured, limits: MemoryLimits) -> int | None:
    """Return the next of the ascending sizes to try; None once the largest that fits is known."""
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
    peaks_by_limit = zip(*(peaks for _, peaks in known), strict=True)
    sizes = [size for size, _ in known]
    return tuple(
        _extrapolated(size, sizes, values, base=base) for values, base in zip(peaks_by_limit, limits.used, strict=True)
    )


def _extrapolated(size: int, sizes: Sequence[int], peaks: Sequence[int], *, base: int) -> int:
    slopes = [(high - low) / (b - a) for (a, low), (b, high) in pairwise(zip(sizes, peaks, strict=True))]
    steepest = max(slopes, default=0.0)
    if steepest <= 0:
        return base + max(0, peaks[-1] - base) * size // sizes[-1]
    if len(slopes) > 1 and slopes[-1] > _CURVED * slopes[-2]:
        quadratic = (size + sizes[-1]) / (
            sizes[-1] + sizes[-2]
        )  # the slope of the next segment of a parabola, relative to this one
        steepest = max(steepest, slopes[-1] * quadratic)
    return int(peaks[-1] + steepest * (size - sizes[-1]))


_CURVED = 1.2
"""Ratio of slopes above which memory is not linear: attention may be quadratic in the length."""
