"""The steps, tokens, seconds and cost until each run first reaches a value of a metric, and its speed-up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.commands.compare.runs import TRAINING_LOSS, ComparedRun, is_lower_better
from finetune.errors import UserError


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
        time = _time_of(run, steps[sign * values <= sign * level], price=price)
        first = times[0] if times else time
        if time.seconds and first.seconds:
            speedup = first.seconds / time.seconds
            efficiency = speedup * first.num_processes / time.num_processes
            time = replace(time, speedup=speedup, efficiency=efficiency)
        times.append(time)
    return TimeToMetric(metric, level, tuple(times))


def _time_of(run: ComparedRun, steps: np.ndarray, *, price: float | None) -> RunTime:
    """Return the time of the first of these steps."""
    if not len(steps):
        return RunTime(run.name, run.history.num_processes)
    step = float(steps[0])
    hours = run.scale_at("device_seconds", step) / 3600
    return RunTime(
        run.name,
        run.history.num_processes,
        step=int(step),
        tokens=run.scale_at("tokens", step),
        seconds=run.scale_at("seconds", step),
        device_hours=hours,
        cost=None if price is None else price * hours,
    )
