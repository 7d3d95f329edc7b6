"""What the runs have reached: the metric that ranks them, and a result for each, the best first."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.sweep.plan.grid import SweepRun
from finetune.commands.sweep.running.history import TRAIN_LOSS, RunHistory
from finetune.commands.sweep.state.outcome import FINISHED, Outcome
from finetune.config.formatting import format_list
from finetune.config.rules.evaluate import metrics_of
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.registry.metrics import METRICS


@dataclass(frozen=True)
class Objective:
    """The metric that ranks the runs, and its direction."""

    metric: str
    is_minimized: bool

    def is_better(self, one: float, other: float) -> bool:
        """Tell whether the first value is better; NaN never is."""
        if math.isnan(one) or math.isnan(other):
            return not math.isnan(one)
        return one < other if self.is_minimized else one > other

    def sort_key(self, value: float | None) -> float:
        """Return what sorts the best first, and what has no value last."""
        if value is None or math.isnan(value):
            return math.inf
        return value if self.is_minimized else -value


def choose_objective(written: str | None, config: RunConfig) -> Objective:
    """Return what `--metric NAME[:minimize|maximize]` means, or what the job itself goes by.

    That is the metric of `checkpoint.keep_best` or `train.early_stopping`, else the loss. Raises UserError for a metric
    that no evaluation of the job measures, or whose direction is not known.
    """
    if written is None:
        section = config.checkpoint.keep_best or config.train.early_stopping
        if section is not None:
            return Objective(section.metric, section.goal == "minimize")
        return Objective("loss" if config.evaluate is not None else TRAIN_LOSS, True)
    name, _, goal = written.partition(":")
    if goal not in ("", "minimize", "maximize"):
        raise UserError(f"--metric {written}: write minimize or maximize after the colon, such as {name}:maximize.")
    if name == TRAIN_LOSS:
        return Objective(name, True)
    _require_measured(name, config)
    known = METRICS[name].goal if name in METRICS else None
    if known is None and not goal:
        raise UserError(f"--metric {name}: its direction is not known. Write {name}:minimize or {name}:maximize.")
    if known is not None and goal not in ("", known):
        raise UserError(f"--metric {written}: {name} is better when it is {_better(known)}. Leave `:{goal}` out.")
    return Objective(name, (known or goal) == "minimize")


def _require_measured(name: str, config: RunConfig) -> None:
    if config.evaluate is None:
        raise UserError(
            f"--metric {name}: the job has no `evaluate`, so only {TRAIN_LOSS} is measured. Add `evaluate` and "
            "`data.validation`, or leave --metric out."
        )
    generate = config.evaluate.generate
    measured = [*metrics_of(config), *(each.rpartition(":")[2] for each in (generate.metrics if generate else ()))]
    if name not in measured:
        raise UserError(f"--metric {name}: no evaluation measures it. They measure {format_list(measured)}.")


def _better(goal: str) -> str:
    return "smaller" if goal == "minimize" else "larger"


@dataclass(frozen=True)
class RunResult:
    """What one run has reached so far; `final` and `best` are of the objective's metric."""

    name: str
    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    folder: Path
    outcome: Outcome
    final: float | None
    best: float | None
    best_step: int | None
    step: int
    seconds: float
    tokens_per_second: float | None


def read_result(
    run: SweepRun, outcome: Outcome, objective: Objective, *, history: RunHistory | None = None
) -> RunResult:
    """Return the result of a run from its folder."""
    history = history or RunHistory(run.folder / "events.jsonl")
    history.read_new()
    measured = history.metric(objective.metric)
    best_step, best = min(measured, key=lambda each: objective.sort_key(each[1]), default=(None, None))
    return RunResult(
        run.name,
        run.values,
        run.overrides,
        run.folder,
        outcome,
        measured[-1][1] if measured else None,
        best,
        best_step,
        max(outcome.step, history.steps[-1] if history.steps else 0),
        history.seconds,
        history.tokens_per_second,
    )


def rank(results: Iterable[RunResult], objective: Objective) -> list[RunResult]:
    """Return finished runs first, then the others; among them the best final value first."""
    return sorted(results, key=lambda each: (each.outcome.state != FINISHED, objective.sort_key(each.final), each.name))


def best_of(ranked: Sequence[RunResult]) -> RunResult | None:
    """Return the best finished run; None where none has a value."""
    for each in ranked:
        if each.outcome.state == FINISHED and each.final is not None and not math.isnan(each.final):
            return each
    return None
