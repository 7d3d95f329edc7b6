"""Timing: the phases of startup, throughput, and the remaining time."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import psutil

from finetune.report.events import StepTaken

_has_timed_process = False  # only the first run in a process counts from the start of the process


@dataclass(frozen=True)
class StartupPhase:
    """A phase of startup and its time; `memory_bytes` is the resident memory after it."""

    name: str
    seconds: float
    cpu_seconds: float
    memory_bytes: int


class StartupTimer:
    """A stopwatch; `started_at` is when the run was called (monotonic), after the imports."""

    def __init__(
        self,
        *,
        seconds_before: float = 0.0,
        cpu_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self.started_at = clock()
        self.phases: list[StartupPhase] = []
        self._last = self.started_at - seconds_before, cpu_before
        self.end("imports")

    @classmethod
    def from_process_start(cls) -> "StartupTimer":
        """Return a timer that counts from the start of this process, including imports; for a later run, from now."""
        global _has_timed_process
        if _has_timed_process:
            return cls(cpu_before=time.process_time())
        _has_timed_process = True
        return cls(seconds_before=max(0.0, time.time() - psutil.Process().create_time()))

    def end(self, name: str) -> None:
        """End a phase; the next one begins."""
        now, cpu_now = self._clock(), self._cpu_clock()
        then, cpu_then = self._last
        self.phases.append(StartupPhase(name, now - then, cpu_now - cpu_then, psutil.Process().memory_info().rss))
        self._last = now, cpu_now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that is timed as its own phase and is not part of the surrounding phase."""
        last, cpu_last = self._last
        before, cpu_before = self._last = self._clock(), self._cpu_clock()
        yield
        self.end(name)
        now, cpu_now = self._last
        self._last = last + now - before, cpu_last + cpu_now - cpu_before


class ThroughputMeter:
    """Tokens per second and remaining time, as medians over a window of recent steps.

    A single step that is delayed by a checkpoint, an evaluation or a compilation does not change a median.
    """

    def __init__(self, num_steps: int, *, window: int = 50, unit: str = "tokens") -> None:
        """`unit` names the counted quantity: tokens or images."""
        self.unit = unit
        self._num_steps = num_steps
        self._recent: deque[StepTaken] = deque(maxlen=window)
        self._waited = self._seconds = 0.0  # since the last log point

    def add(self, event: StepTaken) -> None:
        """Add a step."""
        self._recent.append(event)
        self._waited += event.data_seconds
        self._seconds += event.seconds

    @property
    def data_share(self) -> float:
        """Return the share of time spent waiting for batches since the last log point."""
        return self._waited / self._seconds if self._seconds > 0 else 0.0

    def reset_data_share(self) -> None:
        """Reset the share after it was logged."""
        self._waited = self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the window; 0 before the first step."""
        rates = [event.num_tokens / event.seconds for event in self._recent if event.seconds > 0]
        return median(rates) if rates else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return the duration of the remaining steps at the median speed; None before the first step."""
        if not self._recent:
            return None
        steps_left = max(self._num_steps - self._recent[-1].step, 0)
        return steps_left * median(event.seconds for event in self._recent)
