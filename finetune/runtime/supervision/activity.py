"""Detects progress of rank 0 while it works alone without heartbeats and all others wait for it.

Writing a large model takes longer than the limit of a step. Rank 0 checks the CPU time of its main thread; the others
check the status file, which rank 0 refreshes until it ends or detects that it hangs.
"""

import threading
import time
from typing import Protocol

from finetune.runtime.supervision.status import StatusFile

_LEAST_CPU_SECONDS = 0.01
"""CPU time of a working main thread, also while writing to disk; waiting for a dead disk or a lock takes none."""


class Activity(Protocol):
    """A sign of progress of rank 0."""

    def has_progressed(self) -> bool:
        """Return whether there was any activity since the last call that returned True."""


class OwnActivity:
    """The CPU time of the main thread of this process, rank 0."""

    def __init__(self) -> None:
        self._seen = _main_thread_seconds()

    def has_progressed(self) -> bool:
        """Return whether the main thread has worked."""
        now = _main_thread_seconds()
        if now - self._seen < _LEAST_CPU_SECONDS:
            return False
        self._seen = now
        return True


class OthersActivity:
    """The status file of the run, which rank 0 refreshes."""

    def __init__(self, status: StatusFile) -> None:
        self._status = status
        self._seen: float | None = None

    def has_progressed(self) -> bool:
        """Return whether rank 0 has refreshed the file."""
        before, self._seen = self._seen, self._status.refreshed_at() or self._seen
        return self._seen != before


def _main_thread_seconds() -> float:
    """Return the CPU time of the main thread; without a clock for it, the current time, as if it worked."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
