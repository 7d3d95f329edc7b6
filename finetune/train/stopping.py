"""When to stop before the budget is spent: asked on any rank, agreed by all, between two steps."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finetune.config.sections.train import EarlyStoppingSection
from finetune.errors import UserError
from finetune.runtime.progress import Progress
from finetune.runtime.signals import SignalNote

SPOT_NOTICE, STOP_FILE, FAILED_SAVE, TIME_LIMIT = "spot notice", "STOP file", "checkpoint failed", "time limit"
REASONS = ("signal SIGTERM", "signal SIGINT", "signal SIGHUP", SPOT_NOTICE, STOP_FILE, FAILED_SAVE, TIME_LIMIT)
"""What a rank can ask for; the first that anybody asked for is the one that counts."""


@dataclass(frozen=True)
class Wish:
    """What all ranks have agreed on: why to stop, if at all, and whether to save first."""

    stop_reason: str | None
    saves: bool


@dataclass(frozen=True)
class Wishes:
    """What this rank would like, as counts that are added up in the step's own reduction.

    `asked` holds what else than a signal can ask to stop, by its reason; it is looked at once per step.
    """

    note: SignalNote
    asked: Mapping[str, Callable[[], bool]] = field(default_factory=dict)

    def counts(self) -> list[int]:
        """Return a 1 at each of REASONS for which this rank wants to stop, and a last one if it wants a checkpoint."""
        received = f"signal {self.note.received.name}" if self.note.received else None
        stops = [int(reason == received or (reason in self.asked and self.asked[reason]())) for reason in REASONS]
        saves, self.note.wants_save = int(self.note.wants_save), False
        return [*stops, saves]


def agreed(counts: list[int]) -> Wish:
    """Return what the added-up counts come to: the first reason that any rank gave; no save where saving has failed."""
    *stops, saves = counts
    reason = next((reason for reason, count in zip(REASONS, stops, strict=True) if count), None)
    return Wish(reason, saves=bool(saves or reason) and reason != FAILED_SAVE)


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


class NeverStop:
    """No early stopping."""

    def note(self, metrics: dict[str, float], progress: Progress) -> None:
        """Do nothing."""

    def is_over(self, progress: Progress) -> bool:
        """Return False."""
        return False


class EarlyStopping:
    """Stop when a metric has not got better for `patience` evaluations; what it remembers is in the progress."""

    def __init__(self, section: EarlyStoppingSection) -> None:
        self._section = section

    def note(self, metrics: dict[str, float], progress: Progress) -> None:
        """Take note of an evaluation in `progress`; raises UserError where it has not measured the metric.

        Which metrics there are can depend on the rows: only tags such as `B-PER` have entities.
        """
        if self._section.metric not in metrics:
            missing = self._section.metric
            raise UserError(
                f"train.early_stopping.metric: these rows have no `{missing}`. Measured: {', '.join(metrics)}."
            )
        value = metrics[self._section.metric]
        if self._is_better(value, progress.best_metric):
            progress.best_metric = value
            progress.evaluations_since_best = 0
        else:
            progress.evaluations_since_best += 1

    def is_over(self, progress: Progress) -> bool:
        """Tell whether patience is over; it still is when a stopped run is started again."""
        return progress.evaluations_since_best >= self._section.patience

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(best):  # a correlation with what is the same everywhere is NaN
            return True
        gain = best - value if self._section.goal == "minimize" else value - best
        return gain > self._section.min_delta
