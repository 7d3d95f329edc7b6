"""Waiting for the moment of a fault that comes from outside."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.evidence import EVENTS

_POLL_SECONDS = 0.004
_TAIL_BYTES = 20_000


class StepWatch:
    """Reads how far this attempt is from the end of the event log, which is flushed with every step."""

    def __init__(self, run: Path) -> None:
        self._path = run / EVENTS
        self._begin = self._size()

    def step(self) -> int:
        """Return the last step that this attempt has taken; 0 before the first."""
        size = self._size()
        if size <= self._begin:
            return 0
        with self._path.open("rb") as file:
            file.seek(max(self._begin, size - _TAIL_BYTES))
            lines = file.read().splitlines()
        return max((_step_of(line) for line in lines if b'"StepTaken"' in line), default=0)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def wait_until(is_so: Callable[[], bool], *, has_ended: Callable[[], bool], timeout_seconds: float) -> bool:
    """Wait until it is so; return False where the launch has ended, or time is over, before."""
    deadline = time.monotonic() + timeout_seconds
    while not is_so():
        if has_ended() or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
