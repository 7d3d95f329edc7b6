"""Runs side by side: curves, results, what differs between them, and whether their losses are the same."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.commands.compare.agreement import Agreement, compare_losses
from finetune.commands.compare.differences import Difference, config_differences, environment_differences
from finetune.commands.compare.levels import Levels, choose_metric, find_levels
from finetune.commands.compare.runs import ComparedRun, is_lower_better, read_runs
from finetune.commands.report.report import require_events
from finetune.errors import UserError
from finetune.report.page.charts import chart_kinds, format_chart, in_unit
from finetune.report.page.facts import run_state


@dataclass(frozen=True)
class Result:
    """The state of a run, and its metrics: each evaluation metric's last and best value."""

    run: str
    folder: str
    state: str
    num_processes: int
    steps: int
    tokens: float
    seconds: float
    device_hours: float
    cost: float | None
    training_loss: float | None  # mean of the last 20 steps
    last: dict[str, float]
    best: dict[str, float]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that is known of several runs; `agreements` are those of the second run on with the first."""

    runs: tuple[ComparedRun, ...]
    results: tuple[Result, ...]
    agreements: tuple[Agreement, ...]
    levels: Levels | None
    config: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    price: float | None

    @property
    def metrics(self) -> list[str]:
        """Return the evaluation metrics of any run, by name."""
        return sorted({name for result in self.results for name in result.last})

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, without curves."""
        names = [run.name for run in self.runs]
        found = {
            "runs": [asdict(result) for result in self.results],
            "agreement_with_first": {name: asdict(each) for name, each in zip(names[1:], self.agreements, strict=True)},
            "time_to_level": asdict(self.levels) if self.levels else None,
        }
        tables = {"config_differences": self.config, "environment_differences": self.environment}
        return found | {
            title: {each.key: dict(zip(names, each.values, strict=True)) for each in rows}
            for title, rows in tables.items()
        }

    def charts(self) -> list[dict[str, Any]]:
        """Return the charts, each with the curves of all runs that have one."""
        curves = [(run.name, run.history.curves) for run in self.runs]
        names = set().union(*(run.history.curves for run in self.runs))
        unit = self.runs[0].history.unit
        return [format_chart(in_unit(kind, unit), curves) for kind in chart_kinds(names)]


def build_comparison(
    runs: Sequence[Path], *, metric: str | None = None, level: float | None = None, price: float | None = None
) -> Comparison:
    """Return the runs compared; the first is what the others are measured against.

    Raises UserError for a folder that is no run, and for a metric that no run has.
    """
    if len(runs) < 2:
        raise UserError("compare: name two or more run folders. `finetune report RUN` shows a single one.")
    for run in runs:
        require_events(run)
    found = read_runs(runs)
    first, *others = found
    return Comparison(
        runs=tuple(found),
        results=tuple(_result(run, price=price) for run in found),
        agreements=tuple(compare_losses(first.history.steps, other.history.steps) for other in others),
        levels=find_levels(found, choose_metric(found, metric), level=level, price=price),
        config=tuple(config_differences(found)),
        environment=tuple(environment_differences(found)),
        price=price,
    )


def _result(run: ComparedRun, *, price: float | None) -> Result:
    history = run.history
    state, _ = run_state(history, run.files.status, now=time.time())
    _, losses = run.metric_points("loss")
    hours = history.device_seconds / 3600
    last, best = {}, {}
    for name, values in _evaluations(run):
        last[name], best[name] = values[-1], min(values) if is_lower_better(name) else max(values)
    return Result(
        run=run.name,
        folder=str(run.folder),
        state=state,
        num_processes=history.num_processes,
        steps=history.step,
        tokens=history.tokens,
        seconds=history.seconds,
        device_hours=hours,
        cost=None if price is None else price * hours,
        training_loss=float(losses[-1]) if len(losses) and math.isfinite(losses[-1]) else None,
        last=last,
        best=best,
        missing=(*run.files.missing, *run.history.damaged),
    )


def _evaluations(run: ComparedRun) -> Iterator[tuple[str, list[float]]]:
    for name, curve in run.history.curves.items():
        if name.startswith("evaluation/") and len(values := curve.points().values):
            yield name.partition("/")[2], values.tolist()
