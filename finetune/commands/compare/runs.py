"""The runs to compare: the history of each with every step, and the other files of its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.report.history import RunHistory, read_history
from finetune.report.page.facts import RunFiles, read_run_files

TRAINING_LOSS = "loss"
LOWER_IS_BETTER = ("loss", "perplexity", "error")
_SMOOTHED_STEPS = 20


@dataclass(frozen=True)
class ComparedRun:
    """One run."""

    name: str
    folder: Path
    history: RunHistory
    files: RunFiles

    def metric_points(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a metric; the training loss as the mean of the last 20 steps."""
        if metric == TRAINING_LOSS:
            steps = self.history.steps
            return steps.numbers[_SMOOTHED_STEPS - 1 :].astype(float), _trailing_means(steps.losses)
        points = self.history.curves[metric].points() if metric in self.history.curves else None
        return (points.steps, points.values) if points is not None else (np.empty(0), np.empty(0))

    def scale_at(self, name: str, step: float) -> float:
        """Return `tokens`, `seconds` or `device_seconds` at the step."""
        if name not in self.history.curves:
            return 0.0
        points = self.history.curves[name].points()
        return float(np.interp(step, points.steps, points.values)) if len(points.steps) else 0.0


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs, each named by the shortest end of its path that is unique among them."""
    return [
        ComparedRun(name, folder, read_history(folder), read_run_files(folder))
        for folder, name in zip(folders, short_names(folders), strict=True)
    ]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are unique; equal paths are numbered.

    >>> short_names([Path("/runs/a/first"), Path("/runs/b/first")])
    ['a/first', 'b/first']
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path_parts[-count:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path_parts[-1]} ({number})" for number, path_parts in enumerate(parts, start=1)]


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values of the metric are better, by its name."""
    return any(word in metric for word in LOWER_IS_BETTER)


def _trailing_means(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and the 19 before it, NaN where one of them is not finite."""
    if len(values) < _SMOOTHED_STEPS:
        return np.empty(0)
    means: np.ndarray = np.lib.stride_tricks.sliding_window_view(values, _SMOOTHED_STEPS).mean(axis=1)
    return np.where(np.isfinite(means), means, np.nan)
