"""The trace of one rank from torch's profiler, its communication, and the live memory.

A collective either overlaps with computation or is exposed: on a GPU, computation means kernels of other streams; on a
CPU, operators of this process. Waiting for a slower rank is part of its collective.
"""

import os
import pickle
import shutil
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from finetune.report.profile.phases import (
    COMMUNICATION,
    PHASES,
    Interval,
    Segment,
    difference,
    intersection,
    length,
    union,
)
from finetune.runtime.files import atomic

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


def phase_seconds(segments: Sequence[Segment], traced: Traced, *, wall: float) -> PhaseSeconds:
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


def live_memory(segments: Sequence[Segment], allocations: Sequence[tuple[int, int]]) -> dict[str, Any]:
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

    def write_memory(self, folder: Path, name: str, segments: Sequence[Segment], traced: Traced) -> None:
        """Write the memory: torch's snapshot of a GPU (for pytorch.org/memory_viz), else the live bytes by phase."""
        if self._snapshot is not None:
            atomic.write_bytes(folder / f"{name}.memory.pickle", pickle.dumps(self._snapshot))
        elif traced.allocations:
            atomic.write_json(folder / f"{name}.memory.json", live_memory(segments, traced.allocations))
