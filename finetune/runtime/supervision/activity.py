"""Whether rank 0 gets on with what it does alone, while it passes no point and all others wait for it.

Writing a large model takes longer than a step may. Rank 0 judges itself by the work of its main thread; the others
judge by the status file, which rank 0 refreshes until it ends or finds itself hanging.
"""

import threading
import time
from typing import Protocol

from finetune.runtime.supervision.status import StatusFile

_LEAST_CPU_SECONDS = 0.01
"""Work of the main thread, copying to a disk included; one that waits for a dead disk or for a lock does none."""


class Activity(Protocol):
    """What shows that rank 0 gets on."""

    def has_moved(self) -> bool:
        """Return whether there was any activity since the last call that returned true."""


class OwnActivity:
    """The processor time of the main thread of this process, rank 0."""

    def __init__(self) -> None:
        self._seen = _main_thread_seconds()

    def has_moved(self) -> bool:
        """Return whether the main thread has worked."""
        now = _main_thread_seconds()
        if now - self._seen < _LEAST_CPU_SECONDS:
            return False
        self._seen = now
        return True


class OthersActivity:
    """The status file of the run, as rank 0 refreshes it."""

    def __init__(self, status: StatusFile) -> None:
        self._status = status
        self._seen: float | None = None

    def has_moved(self) -> bool:
        """Return whether rank 0 has refreshed the file."""
        before, self._seen = self._seen, self._status.refreshed_at() or self._seen
        return self._seen != before


def _main_thread_seconds() -> float:
    """Return the processor time of the main thread; where no clock shows it, the time of day, as if it worked."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
