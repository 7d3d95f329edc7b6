"""When to stop before the budget is spent: asked on any rank, agreed by all, between two steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from finetune.config.sections.train import EarlyStoppingSection
from finetune.runtime.progress import Progress
from finetune.runtime.signals import SignalNote

REASONS = ("signal SIGTERM", "signal SIGINT", "time limit")
"""What a rank can ask for; the first that anybody asked for is the one that counts."""


@dataclass(frozen=True)
class Wishes:
    """What this rank would like, as counts that are added up in the step's own reduction."""

    note: SignalNote
    time_limit_seconds: float | None
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0

    def counts(self) -> list[int]:
        """Return a 1 at each of REASONS for which this rank wants to stop."""
        received = f"signal {self.note.received.name}" if self.note.received else None
        is_over = self.time_limit_seconds is not None and self.clock() - self.started >= self.time_limit_seconds
        return [int(reason == received or (reason == "time limit" and is_over)) for reason in REASONS]


def agreed_reason(counts: list[int]) -> str | None:
    """Return the first reason that any rank asked for, from the added-up counts."""
    return next((reason for reason, count in zip(REASONS, counts, strict=True) if count), None)


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
        """Take note of an evaluation in `progress`."""
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
        if best is None:
            return True
        gain = best - value if self._section.goal == "minimize" else value - best
        return gain > self._section.min_delta
