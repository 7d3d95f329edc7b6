"""The phases of a step: a clock that records when each began, their communication in a trace, and their table.

On a GPU the moments are the device's: an event is recorded in the stream at each of them, and all are read once,
after the window, so nothing waits for the device between them.

A collective either overlaps with computation or is exposed: on a GPU, computation means kernels of other streams; on a
CPU, operators of this process. Waiting for a slower rank is part of its collective.
"""

import os
import pickle
import shutil
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from finetune.report.events import Profiled
from finetune.runtime.files import atomic

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


class Moments:
    """Takes moments now and reads them later; these are of this process, from a monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def take(self) -> Any:
        """Return this moment, to be read later."""
        return time.perf_counter_ns()

    def read(self, moment: Any) -> int:
        """Return the moment in nanoseconds since 1970, as the trace counts."""
        return int(moment + self._offset)


class CudaMoments(Moments):
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
class PhaseSegment:
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
        self._step.close()
        self._step.enter_context(self._named(f"ProfilerStep#{number}"))

    def stop(self) -> None:
        """End the last phase."""
        self._step.close()
        self._changes.append((OTHER, self._moments.take()))

    def segments(self) -> list[PhaseSegment]:
        """Return the phases from the first moment to the last; on a GPU this waits for the device."""
        times = [self._moments.read(moment) for _, moment in self._changes]
        names = [name for name, _ in self._changes]
        return [PhaseSegment(name, span) for name, span in zip(names, pairwise(times), strict=False)]

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


_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ncclKernel", "ncclDevKernel")
"""Prefixes of the names of collectives: torch's on the host, and NCCL's kernels."""

_WAITING = ("c10d", "_c10d_functional")
"""Namespaces of operators that wait for other ranks, perhaps within one that computes."""

_CONTAINERS = "autograd::"
"""Prefixes of the names of functions that run other operators, or hooks that may wait."""

_KERNELS = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
_MEMORY = "[memory]"
_NUM_TIMES = 1000
_QUIET = "6"  # Kineto's level above all that it logs; it would print a line at the start and the end of a trace


@dataclass(frozen=True)
class Traced:
    """The intervals and allocations in the trace of one rank."""

    collectives: list[Interval]
    computing: list[Interval]
    allocations: list[tuple[int, int]] = field(default_factory=list)  # (when, bytes), negative where freed, on a CPU


def read_trace(events: Iterable[Any]) -> Traced:
    """Return the intervals of Kineto events: the kernels compute, or the host's operators if there are no kernels."""
    collectives: list[Interval] = []
    kernels: list[Interval] = []
    operators: list[Interval] = []
    waiting: list[Interval] = []
    allocations: list[tuple[int, int]] = []
    for event in events:
        name, activity = event.name(), event.activity_type()
        interval = (event.start_ns(), event.end_ns())
        if name == _MEMORY:
            if "CPU" in str(event.device_type()):
                allocations.append((interval[0], event.nbytes()))
        elif name.startswith(_COLLECTIVES):
            if activity != "gpu_user_annotation":
                collectives.append(interval)
        elif activity in _KERNELS:
            kernels.append(interval)
        elif activity == "cpu_op" and "::" in name and not name.startswith(_CONTAINERS):
            (waiting if name.startswith(_WAITING) else operators).append(interval)
    computing = union(kernels) if kernels else difference(union(operators), union(waiting))
    return Traced(union(collectives), computing, sorted(allocations))


@dataclass(frozen=True)
class PhaseSeconds:
    """The time of one rank in a window of steps by phase; `wall` is their sum, by another clock."""

    seconds: dict[str, float]
    wall: float
    overlapped: float  # communication that overlaps with computation


def phase_seconds(segments: Sequence[PhaseSegment], traced: Traced, *, wall: float) -> PhaseSeconds:
    """Return the time by phase; exposed communication is its own phase, not part of the others."""
    exposed = difference(traced.collectives, traced.computing)
    spent = dict.fromkeys(PHASES, 0)
    intervals_of: dict[str, list[Interval]] = {}
    for segment in segments:
        intervals_of.setdefault(segment.phase, []).append(segment.interval)
    for phase, overlapping in intervals_of.items():
        intervals = union(overlapping)
        sent = length(intersection(intervals, exposed))
        spent[phase] += length(intervals) - sent
        spent[COMMUNICATION] += sent
    whole = union(segment.interval for segment in segments)
    hidden = length(intersection(whole, intersection(traced.collectives, traced.computing)))
    return PhaseSeconds({phase: nanoseconds / 1e9 for phase, nanoseconds in spent.items()}, wall, hidden / 1e9)


def live_memory(segments: Sequence[PhaseSegment], allocations: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the live bytes relative to the start of the window: the peak, the peak of each phase, and over time."""
    when = [moment for moment, _ in allocations]
    live = list(accumulate(size for _, size in allocations))
    begin = segments[0].interval[0] if segments else 0
    peaks: dict[str, int] = {}
    for segment in segments:
        start, end = (bisect_left(when, edge) for edge in segment.interval)
        carried = live[start - 1] if start else 0
        peaks[segment.phase] = max([peaks.get(segment.phase, 0), carried, *live[start:end]])
    every = max(1, len(live) // _NUM_TIMES)
    rows = [(round((when[i] - begin) / 1e9, 6), max(live[i : i + every])) for i in range(0, len(live), every)]
    return {"peak_bytes": max(live, default=0), "peak_bytes_by_phase": peaks, "live_bytes": rows}


class TraceRecorder:
    """Records a trace, and the memory, until it is stopped."""

    def __init__(self, *, has_cuda: bool, memory: bool, stacks: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if has_cuda else [])]
        self._memory_of_device = memory and has_cuda
        self._snapshot: Any = None
        self._profiler = torch.profiler.profile(
            activities=activities, profile_memory=memory and not has_cuda, with_stack=stacks
        )
        if self._memory_of_device:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profiler.start()

    def stop(self) -> None:
        """Stop recording."""
        self._profiler.stop()
        if self._memory_of_device:
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)

    def read(self) -> Traced:
        """Return the recorded intervals and allocations."""
        profiler: Any = self._profiler.profiler
        return read_trace(profiler.kineto_results.events())

    def write(self, trace: Path) -> None:
        """Write the trace, compressed; raises OSError."""
        trace.parent.mkdir(parents=True, exist_ok=True)
        staging = atomic.temporary_path(trace)  # a folder, as torch compresses files named `.gz`
        staging.mkdir()
        try:
            self._profiler.export_chrome_trace(str(staging / trace.name))
            (staging / trace.name).replace(trace)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def write_memory(self, folder: Path, name: str, segments: Sequence[PhaseSegment], traced: Traced) -> None:
        """Write the memory: torch's snapshot of a GPU (for pytorch.org/memory_viz), else the live bytes by phase."""
        if self._snapshot is not None:
            atomic.write_bytes(folder / f"{name}.memory.pickle", pickle.dumps(self._snapshot))
        elif traced.allocations:
            atomic.write_json(folder / f"{name}.memory.json", live_memory(segments, traced.allocations))


WALL, OVERLAPPED, BUSY = "wall", "overlapped", "busy"
"""Rows in addition to the phases; `busy` is the wall time without communication and without waits for slower ranks."""


def spread_over_ranks(ranks: Sequence[PhaseSeconds]) -> dict[str, dict[str, float]]:
    """Return min, median and max seconds of every phase and of the wall time, and the slowest rank."""
    rows = {}
    of_ranks = [
        rank.seconds | {WALL: rank.wall, OVERLAPPED: rank.overlapped, BUSY: rank.wall - rank.seconds[COMMUNICATION]}
        for rank in ranks
    ]
    for name in (*PHASES, OVERLAPPED, BUSY, WALL):
        values = [seconds[name] for seconds in of_ranks]
        slowest = max(range(len(values)), key=values.__getitem__)
        rows[name] = {
            "min": min(values),
            "median": median(values),
            "max": values[slowest],
            "slowest_rank": float(slowest),
        }
    return rows


def format_profile(event: Profiled) -> tuple[str, ...]:
    """Return the table, in milliseconds per step.

    The phases add up to the last row in the column of this rank, but not in the columns of the spread.
    """
    shown = {**event.seconds, WALL: event.wall_seconds}
    last = event.first_step + event.num_steps - 1
    lines = [
        f"profile of steps {event.first_step} to {last}, ms per step (rank 0; then all ranks)",
        f"  {'phase':<14}{'rank 0':>10}{'share':>8}{'min':>10}{'median':>10}{'max':>10}  slowest",
    ]
    for name, seconds in shown.items():
        row = event.ranks.get(name, {})
        numbers = [seconds, *(row.get(column, seconds) for column in ("min", "median", "max"))]
        own, *others = (f"{1000 * number / max(1, event.num_steps):>10.2f}" for number in numbers)
        share = seconds / event.wall_seconds if event.wall_seconds else 0.0
        lines.append(f"  {name:<14}{own}{share:>8.1%}{''.join(others)}  rank {row.get('slowest_rank', 0):.0f}")
    hidden = 1000 * event.overlapped_seconds / max(1, event.num_steps)
    lines.append(f"  {COMMUNICATION}: exposed; another {hidden:.2f} ms overlaps with computation")
    busy = event.ranks.get(BUSY, {"min": 0.0, "max": 0.0})
    if busy["min"] < busy["max"]:
        most, median = (1000 * busy[name] / max(1, event.num_steps) for name in ("max", "median"))
        rank = f"{busy['slowest_rank']:.0f}"
        lines.append(f"  slowest: rank {rank}, {most:.2f} ms a step outside communication, median {median:.2f}")
    return (*lines, *([f"  trace {event.trace}"] if event.trace else []))
