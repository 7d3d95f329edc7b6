"""When to stop before the budget is spent: asked on any rank, agreed by all, between two steps."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finetune.runtime.supervision.signals import ReceivedSignals

SPOT_NOTICE, STOP_FILE, FAILED_SAVE, TIME_LIMIT = "spot notice", "STOP file", "checkpoint failed", "time limit"
REASONS = ("signal SIGTERM", "signal SIGINT", "signal SIGHUP", SPOT_NOTICE, STOP_FILE, FAILED_SAVE, TIME_LIMIT)
"""What a rank can ask for; the first that anybody asked for is the one that counts."""


@dataclass(frozen=True)
class StopRequest:
    """What all ranks have agreed on: why to stop, if at all, and whether to save first."""

    stop_reason: str | None
    saves: bool


@dataclass(frozen=True)
class StopSources:
    """What this rank would like, as counts that are added up in the step's own reduction.

    `asked` holds what else than a signal can ask to stop, by its reason; it is looked at once per step.
    """

    note: ReceivedSignals
    asked: Mapping[str, Callable[[], bool]] = field(default_factory=dict)

    def counts(self) -> list[int]:
        """Return a 1 at each of REASONS for which this rank wants to stop, and a last one if it wants a checkpoint."""
        received = f"signal {self.note.received.name}" if self.note.received else None
        stops = [int(reason == received or (reason in self.asked and self.asked[reason]())) for reason in REASONS]
        saves, self.note.wants_save = int(self.note.wants_save), False
        return [*stops, saves]


def stop_request_of(counts: list[int]) -> StopRequest:
    """Return what the added-up counts come to: the first reason that any rank gave; no save where saving has failed."""
    *stops, saves = counts
    reason = next((reason for reason, count in zip(REASONS, stops, strict=True) if count), None)
    return StopRequest(reason, saves=bool(saves or reason) and reason != FAILED_SAVE)


@dataclass(frozen=True)
class TimeLimit:
    """Whether the time is over."""

    seconds: float
    started: float
    clock: Callable[[], float] = time.monotonic

    def __call__(self) -> bool:
        """Tell whether so many seconds have passed since the start."""
        return self.clock() - self.started >= self.seconds


class StopFile:
    """Whether somebody has put a file there that asks the run to stop; looked for at most once a second."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = -1.0
        self._is_there = False

    def __call__(self) -> bool:
        """Tell whether the file was there when it was last looked for."""
        if not self._is_there and self._clock() - self._looked_at >= 1.0:
            self._looked_at = self._clock()
            self._is_there = self._path.exists()
        return self._is_there
