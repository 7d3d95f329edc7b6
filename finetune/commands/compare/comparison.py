"""Runs side by side: curves, results, what differs between them, and whether their losses are the same."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.commands.compare.agreement import Agreement, compare_losses
from finetune.commands.compare.differences import Difference, config_differences, environment_differences
from finetune.commands.compare.runs import ComparedRun, is_lower_better, read_runs
from finetune.commands.compare.time_to_metric import TimeToMetric, choose_metric, measure_time_to_metric
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
    """The results of several runs; `agreements` compare the second and later runs with the first."""

    runs: tuple[ComparedRun, ...]
    results: tuple[Result, ...]
    agreements: tuple[Agreement, ...]
    time_to_metric: TimeToMetric | None
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
        values = {
            "runs": [asdict(result) for result in self.results],
            "agreement_with_first": {
                name: asdict(agreement) for name, agreement in zip(names[1:], self.agreements, strict=True)
            },
            "time_to_level": asdict(self.time_to_metric) if self.time_to_metric else None,
        }
        tables = {"config_differences": self.config, "environment_differences": self.environment}
        return values | {
            title: {row.key: dict(zip(names, row.values, strict=True)) for row in rows}
            for title, rows in tables.items()
        }

    def charts(self) -> list[dict[str, Any]]:
        """Return the charts, each with the curves of all runs that have one."""
        curves = [(run.name, run.history.curves) for run in self.runs]
        names = set().union(*(run.history.curves for run in self.runs))
        unit = self.runs[0].history.unit
        return [format_chart(in_unit(chart, unit), curves) for chart in chart_kinds(names)]


def build_comparison(
    runs: Sequence[Path], *, metric: str | None = None, level: float | None = None, price: float | None = None
) -> Comparison:
    """Return the runs compared with the first one.

    Raises UserError for a folder that is not that of a run, and for a metric that no run has.
    """
    if len(runs) < 2:
        raise UserError("compare: name two or more run folders. `finetune report RUN` shows a single one.")
    for run in runs:
        require_events(run)
    compared = read_runs(runs)
    first, *others = compared
    return Comparison(
        runs=tuple(compared),
        results=tuple(_result(run, price=price) for run in compared),
        agreements=tuple(compare_losses(first.history.steps, other.history.steps) for other in others),
        time_to_metric=measure_time_to_metric(compared, choose_metric(compared, metric), level=level, price=price),
        config=tuple(config_differences(compared)),
        environment=tuple(environment_differences(compared)),
        price=price,
    )


def _result(run: ComparedRun, *, price: float | None) -> Result:
    history = run.history
    state, _ = run_state(history, run.files.status, now=time.time())
    _, losses = run.metric_points("loss")
    hours = history.device_seconds / 3600
    last, best = {}, {}
    for curve_name, curve in history.curves.items():
        values = curve.points().values.tolist()
        if curve_name.startswith("evaluation/") and values:
            name = curve_name.partition("/")[2]
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
