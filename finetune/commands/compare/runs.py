"""A run to be compared: its steps in full, the history that its charts are drawn from, and the files beside."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.report.build import EVENTS_FILE
from finetune.report.page.facts import RunFiles, read_run_files
from finetune.report.page.history import RunHistory
from finetune.report.page.reader import read_chunks
from finetune.runtime.files.read import open_regular

TRAINING_LOSS = "loss"
LOWER_IS_BETTER = ("loss", "perplexity", "error")
_SMOOTHED_STEPS = 20


@dataclass(frozen=True)
class Steps:
    """Every step of a run, in order; of one that was taken again, the last."""

    numbers: np.ndarray  # int64
    losses: np.ndarray
    orders: np.ndarray  # uint64: the start of the digest of all samples so far; 0 where it is not known


@dataclass(frozen=True)
class ComparedRun:
    """One run."""

    name: str
    folder: Path
    steps: Steps
    history: RunHistory
    files: RunFiles

    def metric_points(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a metric; the training loss as the mean of the last 20 steps."""
        if metric == TRAINING_LOSS:
            return self.steps.numbers[_SMOOTHED_STEPS - 1 :].astype(float), _trailing_means(self.steps.losses)
        points = self.history.curves[metric].points() if metric in self.history.curves else None
        return (points.steps, points.values) if points is not None else (np.empty(0), np.empty(0))

    def scale_at(self, name: str, step: float) -> float:
        """Return `tokens`, `seconds` or `device_seconds` at the step."""
        if name not in self.history.curves:
            return 0.0
        points = self.history.curves[name].points()
        return float(np.interp(step, points.steps, points.values)) if len(points.steps) else 0.0


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs by the shortest ends of their paths that tell them apart."""
    return [_read_run(folder, name=name) for folder, name in zip(folders, short_names(folders), strict=True)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return as few of the last parts of each path as make them different; equal paths are numbered.

    >>> short_names([Path("/runs/a/first"), Path("/runs/b/first")])
    ['a/first', 'b/first']
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{each[-1]} ({number})" for number, each in enumerate(parts, start=1)]


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values of the metric are better, by its name."""
    return any(word in metric for word in LOWER_IS_BETTER)


def _read_run(folder: Path, *, name: str) -> ComparedRun:
    history, columns = RunHistory(), _Columns()
    with open_regular(folder / EVENTS_FILE) as file:
        for lines, _ in read_chunks(file):
            history.add(lines.events, num_damaged=lines.num_damaged)
            columns.add(lines.events)
    return ComparedRun(name, folder, columns.steps(), history, read_run_files(folder))


class _Columns:
    """Collects the steps of a run; a start that resumes at an earlier step drops those after it."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._losses: list[float] = []
        self._orders: list[int] = []

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["event"] == "RunStarted":
                self._cut_after(event["step"])
            elif event["event"] == "StepTaken":
                if self._numbers and event["step"] <= self._numbers[-1]:
                    self._cut_after(event["step"] - 1)
                self._numbers.append(event["step"])
                self._losses.append(float(event.get("loss", "nan")))
                self._orders.append(int((event.get("samples_sha256") or "0")[:16], 16))

    def steps(self) -> Steps:
        return Steps(
            np.array(self._numbers, np.int64), np.array(self._losses, float), np.array(self._orders, np.uint64)
        )

    def _cut_after(self, step: int) -> None:
        count = bisect_right(self._numbers, step)
        for column in (self._numbers, self._losses, self._orders):
            del column[count:]


def _trailing_means(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and the 19 before it, NaN where one of them is not finite."""
    if len(values) < _SMOOTHED_STEPS:
        return np.empty(0)
    found: np.ndarray = np.lib.stride_tricks.sliding_window_view(values, _SMOOTHED_STEPS).mean(axis=1)
    return np.where(np.isfinite(found), found, np.nan)
