"""Sets of moments as sorted intervals that do not overlap, in nanoseconds."""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""The first moment, and the moment after the last."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments that are in any of the intervals.

    >>> union([(5, 9), (0, 3), (2, 4)])
    [(0, 4), (5, 9)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the moments that are in both sets, each as `union` returns it.

    >>> intersection([(0, 4), (5, 9)], [(3, 6)])
    [(3, 4), (5, 6)]
    """
    merged, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            merged.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return merged


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the moments of the first set that are not in the second.

    >>> difference([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    if not one:
        return []
    edges = [one[0][0], *(edge for interval in other for edge in interval), max(one[-1][1], one[0][0])]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersection(one, gaps)


def length(intervals: Iterable[Interval]) -> int:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in intervals)
