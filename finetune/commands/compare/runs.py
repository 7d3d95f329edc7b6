"""The runs of a comparison as read from their folders, and differences between their configs and environments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.report.history import RunHistory
from finetune.report.page.facts import RunFiles, config_lines, is_lower_better

TRAINING_LOSS = "loss"
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
            if len(steps.losses) < _SMOOTHED_STEPS:
                return np.empty(0), np.empty(0)
            means = np.lib.stride_tricks.sliding_window_view(steps.losses, _SMOOTHED_STEPS).mean(axis=1)
            means = np.where(np.isfinite(means), means, np.nan)  # NaN where one of the losses is not finite
            return steps.numbers[_SMOOTHED_STEPS - 1 :].astype(float), means
        points = self.history.curves[metric].points() if metric in self.history.curves else None
        return (points.steps, points.values) if points is not None else (np.empty(0), np.empty(0))

    def scale_at(self, name: str, step: float) -> float:
        """Return `tokens`, `seconds` or `device_seconds` at the step."""
        if name not in self.history.curves:
            return 0.0
        points = self.history.curves[name].points()
        return float(np.interp(step, points.steps, points.values)) if len(points.steps) else 0.0


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


ABSENT = "-"
_PROCESS_VARIABLES = re.compile(r"launcher\.((LOCAL_|GROUP_|ROLE_)?RANK|MASTER_\w+|TORCHELASTIC_\w+)")
"""Variables that identify a process or a launch, without effect on the run."""


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same in all runs: a text for each run, with its source if one is known."""

    key: str
    values: tuple[str, ...]


def config_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the keys of resolved.yaml that differ, each value with its source; the run's own folder is left out."""
    configs = [dict(config_values(run.files.config)) for run in runs]
    plain = [{key: value for key, (value, _) in config.items()} for config in configs]
    sourced = [
        {key: f"{value}  ({source})" if source else value for key, (value, source) in config.items()}
        for config in configs
    ]
    return [
        Difference(key, tuple(config.get(key, ABSENT) for config in sourced))
        for key in _differing(plain)
        if key != "run.folder"
    ]


def environment_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the facts of environment.json that differ."""
    environments = [dict(_flat(run.files.environment)) for run in runs]
    return [
        Difference(key, tuple(environment.get(key, ABSENT) for environment in environments))
        for key in _differing(environments)
    ]


def _differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys, in their order, whose values differ; runs without any, whose file is missing, do not count."""
    known = [run for run in values if run]
    keys = dict.fromkeys(key for run in known for key in run)
    return [key for key in keys if len({run.get(key) for run in known}) > 1]


def config_values(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield dotted keys with value and source; keys without effect are comments and left out."""
    path: list[str] = []
    for line in config_lines(text):
        name, colon, value = line.text.strip().partition(":")
        if not colon or name.startswith("#"):
            continue
        depth = (len(line.text) - len(line.text.lstrip())) // 2
        path = [*path[:depth], name]
        if value.strip():
            yield ".".join(path), (value.strip(), line.source)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{prefix}[{number}]")
    elif value is not None and not _PROCESS_VARIABLES.fullmatch(prefix):
        yield prefix, " ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class RunTime:
    """When a run first reaches the value or a better one; all None for a run that never does."""

    run: str
    num_processes: int
    step: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    device_hours: float | None = None
    cost: float | None = None  # USD; None without a price
    speedup: float | None = None  # the first run's seconds divided by this one's
    efficiency: float | None = None  # the speed-up divided by the ratio of this run's processes to the first's


@dataclass(frozen=True)
class TimeToMetric:
    """A value of a metric, and when each run reaches it."""

    metric: str
    level: float
    reached: tuple[RunTime, ...]


def choose_metric(runs: Sequence[ComparedRun], requested: str | None) -> str:
    """Return the curve to compare by: the requested one, else the evaluation loss where all have it, else the loss.

    Raises UserError for a metric that no run has.
    """
    evaluated = sorted({name for run in runs for name in run.history.curves if name.startswith("evaluation/")})
    metrics = {TRAINING_LOSS: TRAINING_LOSS} | {name.partition("/")[2]: name for name in evaluated}
    if requested is not None and requested not in metrics:
        raise UserError(f"--metric {requested}: no run has it. The runs have: {', '.join(metrics)}.")
    if requested is not None:
        return metrics[requested]
    has_all = all("evaluation/loss" in run.history.curves for run in runs)
    return "evaluation/loss" if has_all else TRAINING_LOSS


def measure_time_to_metric(
    runs: Sequence[ComparedRun], metric: str, *, level: float | None = None, price: float | None = None
) -> TimeToMetric | None:
    """Return when each run reaches the level; without one, the best value that all of them reach.

    None if a run has no value of the metric. Time includes steps, evaluations and waiting for saves, but not start-up.
    """
    sign = 1 if is_lower_better(metric) else -1
    points = [run.metric_points(metric) for run in runs]
    if any(not np.isfinite(values).any() for _, values in points):
        return None
    if level is None:
        level = sign * max(float(np.nanmin(sign * values)) for _, values in points)
    times: list[RunTime] = []
    for run, (steps, values) in zip(runs, points, strict=True):
        time = RunTime(run.name, run.history.num_processes)
        if len(reached := steps[sign * values <= sign * level]):
            step = float(reached[0])
            hours = run.scale_at("device_seconds", step) / 3600
            time = replace(
                time,
                step=int(step),
                tokens=run.scale_at("tokens", step),
                seconds=run.scale_at("seconds", step),
                device_hours=hours,
                cost=None if price is None else price * hours,
            )
        first = times[0] if times else time
        if time.seconds and first.seconds:
            speedup = first.seconds / time.seconds
            efficiency = speedup * first.num_processes / time.num_processes
            time = replace(time, speedup=speedup, efficiency=efficiency)
        times.append(time)
    return TimeToMetric(metric, level, tuple(times))
