"""What a start takes, phase by phase: from the start of the process to the end of its first step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_process_began_again = False  # a second run in one process does not begin with the process


@dataclass(frozen=True)
class Phase:
    """Something that was done at start, and what it took; `memory_bytes` is the resident memory after it."""

    name: str
    seconds: float
    cpu_seconds: float
    memory_bytes: int


class StartUp:
    """A stopwatch; `began_at` says when the run was called (monotonic), after the imports."""

    def __init__(
        self,
        *,
        seconds_before: float = 0.0,
        cpu_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self.began_at = clock()
        self.phases: list[Phase] = []
        self._last = self.began_at - seconds_before, cpu_before
        self.end("imports")

    @classmethod
    def of_process(cls) -> "StartUp":
        """Return one that counts from the start of this process, the imports included; of a later run, from now."""
        global _process_began_again
        if _process_began_again:
            return cls(cpu_before=time.process_time())
        _process_began_again = True
        return cls(seconds_before=max(0.0, time.time() - psutil.Process().create_time()))

    def end(self, name: str) -> None:
        """Note the end of a phase, which is the beginning of the next one."""
        now, cpu_now = self._clock(), self._cpu_clock()
        then, cpu_then = self._last
        self.phases.append(Phase(name, now - then, cpu_now - cpu_then, psutil.Process().memory_info().rss))
        self._last = now, cpu_now
