"""Faults that are signals: a process is killed, told to end, stopped for good or for a while, or slowed down."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence

from tests.faults.processes import Launched
from tests.faults.schedule import ALL, LAUNCHER, Fault

PAUSE_SECONDS = 1.5
SLOW_SECONDS, SLOW_CYCLE = 3.0, (0.06, 0.03)
"""How long a slow rank is slow, and how long it is stopped and runs in turn."""

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "hang": signal.SIGSTOP}


def send(fault: Fault, launched: Launched) -> bool:
    """Do what the fault says to the launch; return False where its target is not there (any more)."""
    pids = targets(fault.target, launched)
    if not pids or launched.has_ended():
        return False
    if fault.kind in SIGNALS:
        return _send(pids, SIGNALS[fault.kind])
    cycle, seconds = ((PAUSE_SECONDS, 0.0), PAUSE_SECONDS) if fault.kind == "pause" else (SLOW_CYCLE, SLOW_SECONDS)
    threading.Thread(target=_slow_down, args=(pids, cycle, seconds), daemon=True).start()
    return True


def targets(name: str, launched: Launched) -> list[int]:
    """Return the processes that a fault is meant for."""
    if name == LAUNCHER:
        return [launched.process.pid]
    pids = launched.rank_pids()
    if name == ALL:
        return pids
    number = int(name.removeprefix("rank "))
    return pids[number : number + 1]


def _slow_down(pids: Sequence[int], cycle: tuple[float, float], seconds: float) -> None:
    """Stop the processes and let them go on in turn; whatever happens, they go on in the end."""
    stopped, runs = cycle
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for number, pause in ((signal.SIGSTOP, stopped), (signal.SIGCONT, runs)):
            if not _send(pids, number):
                return
            time.sleep(pause)


def _send(pids: Sequence[int], number: int) -> bool:
    """Send all of them the signal, and tell whether any was there."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached > 0
