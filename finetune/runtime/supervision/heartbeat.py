"""Named points that a run passes: the watchdog reads the last one, and a fault can be injected there."""

import os
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from finetune.runtime.optional import lazily
from finetune.runtime.supervision.faults import POINTS, VARIABLE, Fault, read_faults

with lazily():  # imports torch, which some commands with heartbeats (deleting checkpoints) do not need
    from finetune.runtime import distributed


@dataclass(frozen=True)
class Heartbeat:
    """A point that was passed, and the time (monotonic seconds)."""

    point: str
    step: int
    at: float


def fault_point(point: str, *, step: int, path: Path | None = None, tensor: Any = None) -> None:
    """Record a heartbeat at this point, and inject a fault if one is due; without faults the cost is negligible.

    `path` is a file that a fault may damage, `tensor` a scalar that it may turn into NaN. Faults are injected in any
    thread, and heartbeats of any thread count, since the main thread may be waiting for a background write.
    """
    global _last_heartbeat, _last_heartbeat_at
    assert point in POINTS, f"{point} is not in faults.POINTS"
    _last_heartbeat_at = now = time.monotonic()
    if threading.current_thread() is threading.main_thread():
        _last_heartbeat = Heartbeat(point, step, now)
    if VARIABLE not in os.environ:
        _faults.cache_clear()  # faults that are set again are injected again
        return
    faults = _faults(os.environ[VARIABLE])
    due = [fault for fault in faults if fault.is_due(point, step=step, rank=distributed.rank(), path=path)]
    for fault in due:
        fault.inject(path, tensor)


def keep_alive() -> None:
    """Record that this process is alive without a heartbeat, since it waits for another process."""
    global _last_heartbeat_at
    _last_heartbeat_at = time.monotonic()


def last_heartbeat() -> Heartbeat:
    """Return the last heartbeat of the main thread."""
    return _last_heartbeat


def last_heartbeat_at() -> float:
    """Return the time of the last heartbeat of any thread (monotonic seconds)."""
    return _last_heartbeat_at


@lru_cache(maxsize=1)
def _faults(written: str) -> list[Fault]:
    return read_faults(written)


_last_heartbeat = Heartbeat("start", 0, time.monotonic())
_last_heartbeat_at = _last_heartbeat.at
