"""When to stop before the budget is used up: requested on any rank and agreed by all, or early stopping. No torch."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finetune.config.sections.train import EarlyStoppingSection
from finetune.errors import UserError
from finetune.registry.observers import NO_REQUEST, Request
from finetune.runtime.optional import lazily
from finetune.runtime.progress import Progress

with lazily():  # torch
    from finetune.runtime.supervision import signals

SPOT_NOTICE, STOP_FILE, FAILED_SAVE, TIME_LIMIT = "spot notice", "STOP file", "checkpoint failed", "time limit"
CALLBACK = "callback"
REASONS = (
    "signal SIGTERM",
    "signal SIGINT",
    "signal SIGHUP",
    SPOT_NOTICE,
    STOP_FILE,
    FAILED_SAVE,
    TIME_LIMIT,
    CALLBACK,
)
"""The reasons for which a rank can request a stop; the first in this order counts."""


@dataclass(frozen=True)
class StopRequest:
    """The agreement of all ranks: the reason to stop, if any, and whether to save and to evaluate first."""

    stop_reason: str | None
    saves: bool
    evaluates: bool = False


@dataclass(frozen=True)
class StopSources:
    """The stop requests of this rank, as counts that are summed in the step's own all-reduce.

    `sources` can request a stop besides a signal, by reason; each is called once per step. `requests` returns
    what callbacks have requested since its last call.
    """

    note: "signals.ReceivedSignals"
    sources: Mapping[str, Callable[[], bool]] = field(default_factory=dict)
    requests: Callable[[], Request] = lambda: NO_REQUEST

    def counts(self) -> list[int]:
        """Return a 1 for each of REASONS for which this rank requests a stop, then for a checkpoint, an evaluation."""
        received = f"signal {self.note.received.name}" if self.note.received else None
        requests = self.requests()
        reasons = (received, CALLBACK if Request.STOP in requests else None)
        stops = [int(reason in reasons or (reason in self.sources and self.sources[reason]())) for reason in REASONS]
        saves, self.note.wants_save = int(self.note.wants_save or Request.SAVE in requests), False
        return [*stops, saves, int(Request.EVALUATE in requests)]


def stop_request_of(counts: list[int]) -> StopRequest:
    """Return the request of the summed counts: the first reason of any rank; no save where saving has failed."""
    *stops, saves, evaluates = counts
    reason = next((reason for reason, count in zip(REASONS, stops, strict=True) if count), None)
    return StopRequest(reason, saves=bool(saves or reason) and reason != FAILED_SAVE, evaluates=bool(evaluates))


class StopFile:
    """A file by which a user requests a stop; checked at most once a second."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._checked_at = -1.0
        self._exists = False

    def __call__(self) -> bool:
        """Return whether the file existed at the last check."""
        if not self._exists and self._clock() - self._checked_at >= 1.0:
            self._checked_at = self._clock()
            self._exists = self._path.exists()
        return self._exists


def remove_stop_file(path: Path, *, log: Callable[[str], object]) -> None:
    """Remove the stop file, so that the same command resumes; log where that fails."""
    try:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        log(f"{path} cannot be removed ({error.strerror}). Remove it, or the next start stops at once.")


FINISHED, EARLY_STOPPING = "finished", "early stopping"

FINAL_REASONS = (FINISHED, EARLY_STOPPING)
"""Reasons after which the model is final; after a signal or a limit the run is to be resumed."""


class EarlyStopping:
    """Stop when a metric has not improved for `patience` evaluations, never without a section; state is in progress."""

    def __init__(self, section: EarlyStoppingSection | None) -> None:
        self._section = section

    def update(self, metrics: dict[str, float], progress: Progress) -> None:
        """Record an evaluation in `progress`; raises UserError if it has not measured the metric.

        The metrics can depend on the rows: only tags such as `B-PER` have entities.
        """
        if self._section is None:
            return
        if self._section.metric not in metrics:
            missing = self._section.metric
            raise UserError(
                f"train.early_stopping.metric: the evaluation has no `{missing}`. It measures {', '.join(metrics)}."
            )
        value, best = metrics[self._section.metric], progress.best_metric
        if best is None or math.isnan(best):  # a correlation with a constant is NaN
            is_better = True
        else:
            gain = best - value if self._section.goal == "minimize" else value - best
            is_better = gain > self._section.min_delta
        if is_better:
            progress.best_metric = value
            progress.evaluations_since_best = 0
        else:
            progress.evaluations_since_best += 1

    def is_over(self, progress: Progress) -> bool:
        """Return whether patience is exhausted; it still is when a stopped run is started again."""
        return self._section is not None and progress.evaluations_since_best >= self._section.patience
