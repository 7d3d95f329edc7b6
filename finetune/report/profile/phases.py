"""The phases of a step, and a clock that records when each of them began.

On a GPU the moments are those of the device: an event is recorded in the stream at each of them, and all are read once,
after the window, so nothing waits for the device between them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

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


DATA, FORWARD, BACKWARD, COMMUNICATION = "data", "forward", "backward", "communication"
OPTIMIZER, LOG, EVALUATE, SAVE, OTHER = "optimizer", "log", "evaluate", "save", "other"
PHASES = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOG, EVALUATE, SAVE, OTHER)
"""The phases in the order of the table. Communication is derived from the trace; it is part of all others."""

RANGE_PREFIX = "finetune."
"""Prefix of the names of ranges in a trace and for NVTX."""


class Moments(Protocol):
    """Takes moments now and reads them later."""

    def take(self) -> Any:
        """Return this moment, to be read later."""

    def read(self, moment: Any) -> int:
        """Return the moment in nanoseconds since 1970, as the trace counts."""


class HostMoments:
    """Moments of this process, from a monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def take(self) -> int:
        """Return this moment."""
        return time.perf_counter_ns()

    def read(self, moment: int) -> int:
        """Return the moment in nanoseconds since 1970."""
        return moment + self._offset


class CudaMoments:
    """Moments at which a GPU reaches an event in its stream; created and read where waiting is allowed."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first, self._first_at = self.take(), time.time_ns()
        self._is_over = False

    def take(self) -> torch.cuda.Event:
        """Queue this moment, without waiting for the device."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self, moment: torch.cuda.Event) -> int:
        """Return the moment in nanoseconds since 1970; the first call waits for the device."""
        if not self._is_over:
            torch.cuda.synchronize()
            self._is_over = True
        return int(self._first_at + 1e6 * self._first.elapsed_time(moment))


@dataclass(frozen=True)
class Segment:
    """A continuous interval in one phase; the segments of a window have no gaps."""

    phase: str
    interval: Interval


class PhaseClock:
    """Records when each phase begins; phases may be nested, and time counts for the innermost."""

    def __init__(self, moments: Moments, *, has_nvtx: bool) -> None:
        self._moments = moments
        self._has_nvtx = has_nvtx
        self._stack = [OTHER]
        self._changes: list[tuple[str, Any]] = [(OTHER, moments.take())]
        self._step = ExitStack()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context whose time counts for the phase, in the trace and in NVTX under its name."""
        with self._named(RANGE_PREFIX + name):
            self._stack.append(name)
            self._changes.append((name, self._moments.take()))
            try:
                yield
            finally:
                self._stack.pop()
                self._changes.append((self._stack[-1], self._moments.take()))

    def begin_step(self, number: int) -> None:
        """Begin the range of a step in the trace, as TensorBoard and Holistic Trace Analysis look for it."""
        self.end_step()
        self._step.enter_context(self._named(f"ProfilerStep#{number}"))

    def end_step(self) -> None:
        """End the range of the step."""
        self._step.close()

    def stop(self) -> None:
        """End the last phase."""
        self.end_step()
        self._changes.append((OTHER, self._moments.take()))

    def segments(self) -> list[Segment]:
        """Return the phases from the first moment to the last; on a GPU this waits for the device."""
        times = [self._moments.read(moment) for _, moment in self._changes]
        names = [name for name, _ in self._changes]
        return [Segment(name, span) for name, span in zip(names, pairwise(times), strict=False)]

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            if not self._has_nvtx:
                yield
                return
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
