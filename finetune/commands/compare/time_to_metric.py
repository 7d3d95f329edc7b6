"""When each run first reaches a level of a metric: in steps, tokens, seconds and money, and by what speed-up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.commands.compare.runs import TRAINING_LOSS, ComparedRun, is_lower_better
from finetune.errors import UserError


@dataclass(frozen=True)
class Reached:
    """When a run is first at the level or better; None throughout for one that never is."""

    run: str
    num_processes: int
    step: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    device_hours: float | None = None
    cost: float | None = None  # USD; None without a price
    speedup: float | None = None  # the first run's seconds by this one's
    efficiency: float | None = None  # the speed-up by how many times the first run's processes this one has


@dataclass(frozen=True)
class Levels:
    """The level of a metric that is looked for, and when each run reaches it."""

    metric: str
    level: float
    reached: tuple[Reached, ...]


def choose_metric(runs: Sequence[ComparedRun], wanted: str | None) -> str:
    """Return the curve to compare by: the wanted one, else the evaluation loss where all have it, else the training's.

    Raises UserError for one that no run has.
    """
    evaluated = sorted({name for run in runs for name in run.history.curves if name.startswith("evaluation/")})
    metrics = {TRAINING_LOSS: TRAINING_LOSS} | {name.partition("/")[2]: name for name in evaluated}
    if wanted is not None and wanted not in metrics:
        raise UserError(f"--metric {wanted}: no run was evaluated by it. They have: {', '.join(metrics)}.")
    if wanted is not None:
        return metrics[wanted]
    has_all = all("evaluation/loss" in run.history.curves for run in runs)
    return "evaluation/loss" if has_all else TRAINING_LOSS


def find_levels(
    runs: Sequence[ComparedRun], metric: str, *, level: float | None = None, price: float | None = None
) -> Levels | None:
    """Return when each run reaches the level; without one, the best value that all of them reach.

    None where some run has no value of the metric. Time counts steps, evaluations and waiting for saves; not start-up.
    """
    sign = 1 if is_lower_better(metric) else -1
    points = [run.metric_points(metric) for run in runs]
    if any(not np.isfinite(values).any() for _, values in points):
        return None
    common = sign * max(float(np.nanmin(sign * values)) for _, values in points)
    wanted = common if level is None else level
    found = [
        _reached(run, steps[sign * values <= sign * wanted], price=price)
        for run, (steps, values) in zip(runs, points, strict=True)
    ]
    return Levels(metric, wanted, tuple(_with_speedup(each, found[0]) for each in found))


def _reached(run: ComparedRun, steps: np.ndarray, *, price: float | None) -> Reached:
    if not len(steps):
        return Reached(run.name, run.history.num_processes)
    step = float(steps[0])
    hours = run.scale_at("device_seconds", step) / 3600
    return Reached(
        run.name,
        run.history.num_processes,
        step=int(step),
        tokens=run.scale_at("tokens", step),
        seconds=run.scale_at("seconds", step),
        device_hours=hours,
        cost=None if price is None else price * hours,
    )


def _with_speedup(each: Reached, first: Reached) -> Reached:
    if not each.seconds or not first.seconds:
        return each
    speedup = first.seconds / each.seconds
    efficiency = speedup * first.num_processes / each.num_processes
    return Reached(**{**vars(each), "speedup": speedup, "efficiency": efficiency})
