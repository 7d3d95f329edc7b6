"""The phases of a step: a clock that records when each began, their communication in a trace, and their table.

On a GPU the moments are the device's: an event is recorded in the stream at each of them, and all are read once,
after the window, so nothing waits for the device between them.

A collective either overlaps with computation or is exposed: on a GPU, computation means kernels of other streams; on a
CPU, operators of this process. Waiting for a slower rank is part of its collective.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any

import torch

from finetune.report.events import Profiled

DATA, FORWARD, BACKWARD, COMMUNICATION = "data", "forward", "backward", "communication"
OPTIMIZER, LOG, EVALUATE, SAVE, OTHER = "optimizer", "log", "evaluate", "save", "other"
PHASES = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOG, EVALUATE, SAVE, OTHER)
"""The phases in the order of the table. Communication is derived from the trace; it is part of all others."""

RANGE_PREFIX = "finetune."
"""Prefix of the names of ranges in a trace and for NVTX."""

Change = tuple[int, str]
"""A moment in nanoseconds since 1970, as the trace counts, and the phase that begins then."""


class PhaseClock:
    """Records when each phase begins; phases may be nested, and time counts for the innermost."""

    def __init__(self, device: torch.device) -> None:
        self._has_cuda = device.type == "cuda"
        if self._has_cuda:
            torch.cuda.synchronize()
        self._began_at, self._first = time.time_ns(), self._moment()
        self._stack = [OTHER]
        self._changes: list[tuple[Any, str]] = [(self._first, OTHER)]
        self._step = ExitStack()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context whose time counts for the phase, in the trace and in NVTX under its name."""
        with self._range(RANGE_PREFIX + name):
            self._stack.append(name)
            self._changes.append((self._moment(), name))
            try:
                yield
            finally:
                self._stack.pop()
                self._changes.append((self._moment(), self._stack[-1]))

    def begin_step(self, number: int) -> None:
        """Begin the range of a step in the trace, as TensorBoard and Holistic Trace Analysis look for it."""
        self._step.close()
        self._step.enter_context(self._range(f"ProfilerStep#{number}"))

    def stop(self) -> list[Change]:
        """Return when each phase began, the end last; on a GPU this waits for the device."""
        self._step.close()
        self._changes.append((self._moment(), OTHER))
        if not self._has_cuda:
            return self._changes
        torch.cuda.synchronize()
        return [(self._began_at + int(1e6 * self._first.elapsed_time(event)), name) for event, name in self._changes]

    def _moment(self) -> Any:
        """Return this moment, on a GPU as an event that is queued without waiting for the device."""
        if not self._has_cuda:
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if self._has_cuda else nullcontext():
            yield


_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ncclKernel", "ncclDevKernel")
"""Prefixes of the names of collectives: torch's on the host, and NCCL's kernels."""

_WAITING = ("c10d", "_c10d_functional")
"""Namespaces of operators that wait for other ranks, perhaps within one that computes."""

_CONTAINERS = "autograd::"
"""Prefixes of the names of functions that run other operators, or hooks that may wait."""

_KERNELS = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[int, int]
"""The first moment, and the moment after the last, in nanoseconds since 1970."""


@dataclass
class Traced:
    """The intervals in the trace of one rank, which may overlap."""

    collectives: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    operators: list[Interval] = field(default_factory=list)
    waiting: list[Interval] = field(default_factory=list)


def read_trace(events: Iterable[Any]) -> Traced:
    """Return the intervals of Kineto events."""
    traced = Traced()
    for event in events:
        name, activity, interval = event.name(), event.activity_type(), (event.start_ns(), event.end_ns())
        if name.startswith(_COLLECTIVES):
            if activity != "gpu_user_annotation":
                traced.collectives.append(interval)
        elif activity in _KERNELS:
            traced.kernels.append(interval)
        elif activity == "cpu_op" and "::" in name and not name.startswith(_CONTAINERS):
            (traced.waiting if name.startswith(_WAITING) else traced.operators).append(interval)
    return traced


@dataclass(frozen=True)
class PhaseSeconds:
    """The time of one rank in a window of steps by phase; `wall` is their sum, by another clock."""

    seconds: dict[str, float]
    wall: float
    overlapped: float  # communication that overlaps with computation


def phase_seconds(changes: Sequence[Change], traced: Traced, *, wall: float) -> PhaseSeconds:
    """Return the time by phase; exposed communication is its own phase, not part of the others."""
    kinds = {"collective": traced.collectives, "waiting": traced.waiting}
    kinds["computing"] = traced.kernels or traced.operators
    edges: list[tuple[int, int, str]] = [(moment, 0, phase) for moment, phase in changes]
    for kind, intervals in kinds.items():
        edges += [(start, 1, kind) for start, _ in intervals] + [(end, -1, kind) for _, end in intervals]
    spent, num_open = dict.fromkeys(PHASES, 0), dict.fromkeys(kinds, 0)
    overlapped, last, phase = 0, changes[0][0], OTHER
    for moment, opened, name in sorted(edges, key=itemgetter(0)):  # stable: phases stay in order
        passed = min(moment, changes[-1][0]) - last
        if passed > 0:
            is_computing = num_open["computing"] and (traced.kernels or not num_open["waiting"])
            is_exposed = num_open["collective"] and not is_computing
            spent[COMMUNICATION if is_exposed else phase] += passed
            overlapped += passed if num_open["collective"] and is_computing else 0
            last += passed
        if opened:
            num_open[name] += opened
        else:
            phase = name
    return PhaseSeconds({name: nanoseconds / 1e9 for name, nanoseconds in spent.items()}, wall, overlapped / 1e9)


WALL, OVERLAPPED, BUSY = "wall", "overlapped", "busy"
"""Rows in addition to the phases: communication that computation hides; the wall time without exposed communication."""


def spread_over_ranks(ranks: Sequence[PhaseSeconds]) -> dict[str, dict[str, float]]:
    """Return min, median and max seconds of every phase and of the wall time, and the slowest rank."""
    rows = {}
    for name, *values in zip((*PHASES, OVERLAPPED, BUSY, WALL), *map(_all_rows, ranks), strict=True):
        slowest = max(range(len(values)), key=values.__getitem__)
        spread = {"min": min(values), "median": median(values), "max": values[slowest]}
        rows[name] = {**spread, "slowest_rank": float(slowest)}
    return rows


def _all_rows(spent: PhaseSeconds) -> list[float]:
    return [*spent.seconds.values(), spent.overlapped, spent.wall - spent.seconds[COMMUNICATION], spent.wall]


def format_profile(event: Profiled) -> tuple[str, ...]:
    """Return the table, in milliseconds per step.

    The phases add up to the last row in the column of this rank, but not in the columns of the spread.
    """
    busy = event.wall_seconds - event.seconds.get(COMMUNICATION, 0.0)
    shown = {**event.seconds, OVERLAPPED: event.overlapped_seconds, BUSY: busy, WALL: event.wall_seconds}
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
    return (*lines, *([f"  trace {event.trace}"] if event.trace else []))
