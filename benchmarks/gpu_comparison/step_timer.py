"""What is measured of a case's steps: when each began on the device, its phases, memory, and waits for the device."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_comparison.cases import PROFILED, TIMED, WARM_UP
from gpu_comparison.kernels import RANGE, read_profile


@dataclass
class StepTimer:
    """Told where each step begins and where its phases end; calls `finish` when it knows enough."""

    device: torch.device
    finish: Callable[[dict[str, Any]], None]
    tokens: Counter[int] = field(default_factory=Counter)  # by step
    facts: dict[str, Any] = field(default_factory=dict)  # whatever else is to stand in the record
    _marks: list[tuple[int, str, Any]] = field(default_factory=list)
    _step: int = -1
    _started: float = field(default_factory=time.perf_counter)
    _record: dict[str, Any] = field(default_factory=dict)
    _profile: Any = None
    _range: Any = None

    def step(self) -> None:
        """Begin the next step: its data has come."""
        self._step += 1
        if self._step == WARM_UP:
            self._record["warm_up_seconds"] = self._now() - self._started
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        self.mark("data")
        if self._step == WARM_UP + TIMED:
            self._now()  # all kernels of the timed steps have ended
            self._record["peak_bytes"] = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            self._begin_profile()
        if self._step == WARM_UP + TIMED + PROFILED:
            self._end_profile()
            self.finish(self.record())

    def mark(self, phase: str) -> None:
        """Note that the phase of this step ends here, without waiting for the device."""
        is_timed = WARM_UP <= self._step < WARM_UP + TIMED
        if not is_timed and (self._step, phase) != (WARM_UP + TIMED, "data"):
            return
        mark: Any = time.perf_counter()
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((self._step, phase, mark))

    def count(self, tokens: int) -> None:
        """Count tokens of this step that are no padding."""
        self.tokens[self._step] += tokens

    def record(self) -> dict[str, Any]:
        """Return what was found, as JSON."""
        begins = [mark for _, phase, mark in self._marks if phase == "data"]
        spans = [self._between(one, other) for one, other in pairwise(begins)]
        timed = [self.tokens[step] for step in range(WARM_UP, WARM_UP + TIMED)]
        return {**self.facts, **self._record, "step_seconds": spans, "step_tokens": timed, "phases": self._phases()}

    def _phases(self) -> dict[str, float]:
        """Return the mean seconds of each phase of a step; `data` is what lies between an update and the next batch."""
        sums: Counter[str] = Counter()
        for (_, _, one), (_, phase, other) in pairwise(self._marks):
            sums[phase] += self._between(one, other)  # type: ignore[assignment]
        return {phase: seconds / TIMED for phase, seconds in sums.items()}

    def _between(self, one: Any, other: Any) -> float:
        return one.elapsed_time(other) / 1000 if self.device.type == "cuda" else other - one

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _begin_profile(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()
        self._range = record_function(RANGE)
        self._range.__enter__()

    def _end_profile(self) -> None:
        self._range.__exit__(None, None, None)
        self._profile.stop()
        events = self._profile.profiler.kineto_results.events()
        found = read_profile(events, num_steps=PROFILED)
        self._record["waits_per_step"] = sum(found["waits"].values()) / PROFILED if self.device.type == "cuda" else None
        self._record["profile"] = found
        self._record["memory"] = self._memory()

    def _memory(self) -> dict[str, float]:
        """Return in GiB what the process has and had at most, and how often the allocator had to give back."""
        if self.device.type != "cuda":
            return {}
        found = torch.cuda.memory_stats()
        named = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
        return {
            **{name.replace("_bytes.all.", " "): found.get(name, 0) / 2**30 for name in named},
            "retries": found.get("num_alloc_retries", 0),
        }
