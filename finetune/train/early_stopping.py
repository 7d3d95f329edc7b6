"""Early stopping, and the reasons why a run has ended; imports no torch."""

import math

from finetune.config.sections.train import EarlyStoppingSection
from finetune.errors import UserError
from finetune.runtime.progress import Progress

FINISHED, EARLY_STOPPING = "finished", "early stopping"

FINAL_REASONS = (FINISHED, EARLY_STOPPING)
"""Reasons after which the model is final; after a signal or a limit the run is to be resumed."""


class NeverStop:
    """No early stopping."""

    def update(self, metrics: dict[str, float], progress: Progress) -> None:
        """Do nothing."""

    def is_over(self, progress: Progress) -> bool:
        """Return False."""
        return False


class EarlyStopping:
    """Stop when a metric has not improved for `patience` evaluations; its state is in the progress."""

    def __init__(self, section: EarlyStoppingSection) -> None:
        self._section = section

    def update(self, metrics: dict[str, float], progress: Progress) -> None:
        """Record an evaluation in `progress`; raises UserError if it has not measured the metric.

        The metrics can depend on the rows: only tags such as `B-PER` have entities.
        """
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
        return progress.evaluations_since_best >= self._section.patience
