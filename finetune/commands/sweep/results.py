"""The results of the runs: the metric that ranks them, and the table with the best first."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from finetune.commands.sweep.axes import short_keys, shown_value
from finetune.commands.sweep.runs import FAILED, FINISHED, RunOutcome, SweepRun
from finetune.config.formatting import format_list
from finetune.config.rules.checkpoint import evaluation_metrics
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.registry.tasks import METRICS
from finetune.report.history import RunHistory, read_history

TRAIN_LOSS = "train_loss"
"""The objective without evaluations: the mean loss per target of the last steps."""

_RECENT_STEPS = 20

ABSENT = "-"


@dataclass(frozen=True)
class Objective:
    """The metric that ranks the runs, and its direction."""

    metric: str
    is_minimized: bool

    def sort_key(self, value: float | None) -> float:
        """Return a number that sorts the best value first, and NaN and None last."""
        if value is None or math.isnan(value):
            return math.inf
        return value if self.is_minimized else -value


def choose_objective(text: str | None, config: RunConfig) -> Objective:
    """Return the objective of `--metric NAME[:minimize|maximize]`, or the job's own.

    That is the metric of `checkpoint.keep_best` or `train.early_stopping`, else the loss. Raises UserError for a metric
    that no evaluation of the job measures, or with an unknown direction.
    """
    if text is None:
        section = config.checkpoint.keep_best or config.train.early_stopping
        if section is not None:
            return Objective(section.metric, section.goal == "minimize")
        return Objective("loss" if config.evaluate is not None else TRAIN_LOSS, True)
    name, _, goal = text.partition(":")
    measured = {TRAIN_LOSS: "minimize"}
    if config.evaluate is not None:
        generate = config.evaluate.generate
        generated = [metric.rpartition(":")[2] for metric in (generate.metrics if generate else ())]
        for metric in (*evaluation_metrics(config), *generated):
            measured[metric] = METRICS[metric].goal if metric in METRICS else ""
    if name not in measured:
        raise UserError(f"--metric {name}: no evaluation of the job measures it. Measured: {format_list([*measured])}.")
    goals = [measured[name]] if measured[name] else ["minimize", "maximize"]
    if (goal or measured[name]) not in goals:
        written = " or ".join(f"{name}:{known}" for known in goals)
        raise UserError(f"--metric {text}: write its direction, {written}.")
    return Objective(name, (goal or measured[name]) == "minimize")


def history_so_far(run_folder: Path) -> RunHistory:
    """Return the history of the run; an empty one if its events cannot be read."""
    try:
        return read_history(run_folder)
    except OSError:
        return RunHistory()


def measurements(history: RunHistory, metric: str) -> list[tuple[int, float]]:
    """Return the steps at which the metric was measured, with its values."""
    if metric != TRAIN_LOSS:
        evaluations = history.evaluations
        return [
            (evaluation.step, evaluation.metrics[metric]) for evaluation in evaluations if metric in evaluation.metrics
        ]
    if not history.steps:
        return []
    targets = history.steps.values("num_targets")[-_RECENT_STEPS:]
    loss_sum = float(np.sum(history.steps.losses[-_RECENT_STEPS:] * targets))
    return [(history.step, loss_sum / float(targets.sum()) if targets.any() else math.nan)]


@dataclass(frozen=True)
class SweepResult:
    """The result of one run so far; `final` and `best` are values of the objective's metric."""

    run: SweepRun
    outcome: RunOutcome
    final: float | None
    best: float | None
    best_step: int | None


def read_sweep_result(run: SweepRun, outcome: RunOutcome, objective: Objective) -> SweepResult:
    """Return the result of a run from the events in its folder."""
    measured = measurements(history_so_far(run.folder), objective.metric)
    best_step, best = min(measured, key=lambda pair: objective.sort_key(pair[1]), default=(None, None))
    return SweepResult(run, outcome, measured[-1][1] if measured else None, best, best_step)


def rank_results(results: Iterable[SweepResult], objective: Objective) -> list[SweepResult]:
    """Return finished runs first, then the others; among them the best final value first."""
    return sorted(
        results,
        key=lambda result: (result.outcome.state != FINISHED, objective.sort_key(result.final), result.run.name),
    )


def best_of(ranked: Sequence[SweepResult]) -> SweepResult | None:
    """Return the best finished run; None if none has a value."""
    finished = (result for result in ranked if result.outcome.state == FINISHED)
    return next((result for result in finished if result.final is not None and not math.isnan(result.final)), None)


def results_table(results: Sequence[SweepResult], objective: Objective, *, swept: Sequence[str]) -> Table:
    """Return a row for each run in this order."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in short_keys(list(swept)).values():
        table.add_column(label, overflow="fold")
    for column in (objective.metric, "best", "at step", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for result in results:
        shown = {
            key: f"{value:.6g}" if isinstance(value, float) else shown_value(value)
            for key, value in result.run.values.items()
        }
        outcome = result.outcome
        first = next(iter(outcome.message.splitlines()), "")
        status = f"{outcome.state}: {first}" if first else outcome.state
        table.add_row(
            *(shown.get(key, ABSENT) for key in swept),
            _number(result.final),
            _number(result.best),
            ABSENT if result.best_step is None else str(result.best_step),
            f"{outcome.step}/{outcome.num_steps}" if outcome.num_steps else ABSENT,
            Text(status, {FINISHED: "green", FAILED: "red"}.get(outcome.state, "")),
        )
    return table


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def closing_lines(results: Sequence[SweepResult], objective: Objective) -> Iterator[str]:
    """Yield the best run and where it is, how to start failed runs, and the number of unfinished ones."""
    best = best_of(results)
    if best is not None:
        yield f"best: {best.run.name}, {objective.metric} {_number(best.final)} after step {best.outcome.step}"
        yield f"  its model: {best.run.folder / 'final'}"
    if any(result.outcome.state == FAILED for result in results):
        yield "after a fix, the same command with --retry-failed starts the failed runs again"
    num_open = sum(result.outcome.state not in (FINISHED, FAILED) for result in results)
    if num_open:
        yield f"{num_open} of {len(results)} runs are not finished; the same command continues"
