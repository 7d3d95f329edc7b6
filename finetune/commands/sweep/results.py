"""The results of the runs: the metric that ranks them, their progress, the table with the best first, page and JSON."""

import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from finetune.commands.sweep.axes import short_keys, shown_value
from finetune.commands.sweep.runs import FAILED, FINISHED, PRUNED, RunOutcome, SweepRun
from finetune.config.formatting import format_list
from finetune.config.rules.checkpoint import evaluation_metrics
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.registry.tasks import METRICS
from finetune.report.console import format_hms, format_metrics
from finetune.report.history import RunHistory, read_history
from finetune.runtime.optional import lazily
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.redact import redacted_command
from finetune.runtime.text.rich_console import SafeConsole, styled_stream

with lazily():  # imported only to draw
    from finetune.commands.compare import compare

PAGE = "sweep.html"
_MIN_RUNS_ON_PAGE, MAX_RUNS_ON_PAGE = 2, 20
"""The page shows only the best runs, since more curves cannot be distinguished."""

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
    if goal not in ("", "minimize", "maximize"):
        raise UserError(f"--metric {text}: write minimize or maximize after the colon, such as {name}:maximize.")
    if name == TRAIN_LOSS:
        return Objective(name, True)
    if config.evaluate is None:
        raise UserError(
            f"--metric {name}: the job has no `evaluate`, so only {TRAIN_LOSS} is measured. Add `evaluate` and "
            "`data.validation`, or leave --metric out."
        )
    generate = config.evaluate.generate
    generated = [metric.rpartition(":")[2] for metric in (generate.metrics if generate else ())]
    measured = [*evaluation_metrics(config), *generated]
    if name not in measured:
        raise UserError(f"--metric {name}: no evaluation measures it. They measure {format_list(measured)}.")
    known = METRICS[name].goal if name in METRICS else None
    if known is None and not goal:
        raise UserError(f"--metric {name}: its direction is not known. Write {name}:minimize or {name}:maximize.")
    if known is not None and goal not in ("", known):
        better = "smaller" if known == "minimize" else "larger"
        raise UserError(f"--metric {text}: {name} is better when it is {better}. Leave `:{goal}` out.")
    return Objective(name, (known or goal) == "minimize")


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


def step_seconds(history: RunHistory) -> float:
    """Return the time of all steps, without evaluations and saves; a repeated step counts once."""
    return float(np.nansum(history.steps.values("seconds")))


def tokens_per_second(history: RunHistory) -> float | None:
    """Return the tokens of all steps by their time; None before the first."""
    seconds = step_seconds(history)
    return float(np.nansum(history.steps.values("num_tokens"))) / seconds if seconds > 0 else None


SECONDS_BETWEEN_LINES = 30.0

Progress = tuple[SweepRun, RunHistory, bool]
"""A run, its history, and whether it is stopping."""


class SweepScreen:
    """Lines about runs that end, and the active runs: in a table below on a terminal, else in lines every 30 s."""

    def __init__(self, file: TextIO, *, num_runs: int) -> None:
        self._file = file
        self._num_runs = num_runs
        self._num_started = self._num_ended = 0
        self._shown_at: dict[str, float] = {}
        self._live: Live | None = None
        if sys.stdout.isatty() and file.isatty():
            # Without a thread that redraws it: this process forks.
            console = SafeConsole(file=styled_stream(file))
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()

    def start_run(self, run: SweepRun) -> None:
        """Show that a run was started, and its log file; it appears in the table by itself."""
        self._num_started += run.name not in self._shown_at  # a run of a lost host is started again
        self._shown_at[run.name] = time.monotonic()
        if self._live is None:
            self.log(f"[{self._num_started}/{self._num_runs}] {run.name}: started, log in {run.log}")

    def update(self, active: Sequence[Progress]) -> None:
        """Draw the table, or print the active runs that were not shown recently."""
        if self._live is not None:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.title = f"{self._num_ended} of {self._num_runs} runs ended"
            for column in ("run", "state", "step", "loss", "tokens/s", "time left"):
                table.add_column(column, no_wrap=column != "run", overflow="fold")
            for run, history, is_stopping in active:
                table.add_row(run.name, *_cells(run, history, is_stopping))
            self._live.update(table, refresh=True)
            return
        now = time.monotonic()
        for run, history, is_stopping in active:
            if now - self._shown_at[run.name] >= SECONDS_BETWEEN_LINES:
                self._shown_at[run.name] = now
                state, step, loss, speed, time_left = _cells(run, history, is_stopping)
                facts = f"step {step}  loss {loss}  {speed} tokens/s  eta {time_left}" if step else state
                self.log(f"{run.name}: {facts}")

    def end_run(self, run: SweepRun, outcome: RunOutcome, history: RunHistory) -> None:
        """Show how a run has ended, in one line, followed by the rest of the message of a run that failed."""
        self._num_ended += 1
        facts = [outcome.state]
        if outcome.num_steps:
            facts.append(f"step {outcome.step}/{outcome.num_steps}")
        if history.evaluations:
            facts.append(format_metrics(history.evaluations[-1].metrics))
        elif history.steps:
            facts.append(f"loss {history.steps.losses[-1]:.4f}")
        first, *more = outcome.message.splitlines() or [""]
        line = f"{run.name}: {'  '.join(facts)}{f'  ({first})' if first else ''}"
        self.log("\n".join([line, *(f"  {text}" for text in more)]))

    def log(self, line: str) -> None:
        """Print the line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(line, soft_wrap=True)
        else:
            print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()


def _cells(run: SweepRun, history: RunHistory, is_stopping: bool) -> tuple[str, str, str, str, str]:
    """Return state, step, loss, tokens per second and time left of an active run; empty while they are unknown."""
    status = read_status(run.folder)
    is_running = status.get("state") == "running" and history.steps
    state = "stopping" if is_stopping else "running" if is_running else "starting"
    num_steps = status.get("num_steps")
    if not history.steps or not isinstance(num_steps, int):
        return state, "", "", "", ""
    time_left = (num_steps - history.step) * step_seconds(history) / len(history.steps)
    return (
        state,
        f"{history.step}/{num_steps}",
        f"{history.steps.losses[-1]:.4f}",
        f"{tokens_per_second(history) or 0.0:,.0f}",
        format_hms(time_left),
    )


@dataclass(frozen=True)
class SweepResult:
    """The result of one run so far; `final` and `best` are values of the objective's metric."""

    run: SweepRun
    outcome: RunOutcome
    final: float | None
    best: float | None
    best_step: int | None
    step: int
    seconds: float
    tokens_per_second: float | None


def read_sweep_result(run: SweepRun, outcome: RunOutcome, objective: Objective) -> SweepResult:
    """Return the result of a run from the events in its folder."""
    history = history_so_far(run.folder)
    measured = measurements(history, objective.metric)
    best_step, best = min(measured, key=lambda pair: objective.sort_key(pair[1]), default=(None, None))
    return SweepResult(
        run=run,
        outcome=outcome,
        final=measured[-1][1] if measured else None,
        best=best,
        best_step=best_step,
        step=max(outcome.step, history.step),
        seconds=step_seconds(history),
        tokens_per_second=tokens_per_second(history),
    )


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
    for column in (objective.metric, "best", "at step", "steps", "time", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for result in results:
        values, outcome = result.run.values, result.outcome
        cells = []
        for key in swept:
            value = values.get(key)
            shown = f"{value:.6g}" if isinstance(value, float) else shown_value(value)
            cells.append(shown if key in values else ABSENT)
        first = next(iter(outcome.message.splitlines()), "")
        status = f"{outcome.state}: {first}" if first else outcome.state
        table.add_row(
            *cells,
            _number(result.final),
            _number(result.best),
            ABSENT if result.best_step is None else str(result.best_step),
            f"{result.step}/{outcome.num_steps}" if outcome.num_steps else ABSENT,
            format_hms(result.seconds) if result.seconds else ABSENT,
            f"{result.tokens_per_second:,.0f}" if result.tokens_per_second is not None else ABSENT,
            Text(status, {FINISHED: "green", FAILED: "red"}.get(outcome.state, "")),
        )
    return table


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def closing_lines(
    results: Sequence[SweepResult], objective: Objective, *, job: Path, again: Sequence[str]
) -> Iterator[str]:
    """Yield the best run and how to use it, failed runs and unfinished ones; `again` is the command that continues."""
    best = best_of(results)
    if best is not None:
        folder = best.run.folder
        yield f"best: {best.run.name}, {objective.metric} {_number(best.final)} after step {best.step}"
        if best.best_step not in (None, best.step) and best.best != best.final:
            yield f"  it was {_number(best.best)} at step {best.best_step}"
        yield f"  its model: {folder / 'final'}"
        yield f"  export it: {shlex.join(['finetune', 'export', str(folder), '--to', 'FOLDER'])}"
        options = [word for override in best.run.overrides for word in ("--set", override)]
        words = redacted_command(["finetune", "--config", str(job), *options])
        yield f"  train with its values: {shlex.join(words)}"
    failed = [result for result in results if result.outcome.state == FAILED]
    for result in failed:
        yield f"failed: {result.run.name}: {result.outcome.message}"
    if failed:
        yield f"after a fix, start the failed runs again: {shlex.join([*again, '--retry-failed'])}"
    num_open = sum(result.outcome.state not in (FINISHED, FAILED, PRUNED) for result in results)
    if num_open:
        yield f"{num_open} of {len(results)} runs are not finished; the same command continues: {shlex.join(again)}"


def results_json(
    results: Sequence[SweepResult], objective: Objective, *, folder: Path, page: Path | None
) -> dict[str, Any]:
    """Return the sweep as plain JSON values; a number that is not finite is a string."""
    best = best_of(results)
    runs = []
    for result in results:
        values = (result.final, result.best)
        final, best_value = (value if value is None or math.isfinite(value) else str(value) for value in values)
        runs.append(
            {
                "name": result.run.name,
                "values": dict(result.run.values),
                "folder": str(result.run.folder),
                "state": result.outcome.state,
                "message": result.outcome.message or None,
                "final": final,
                "best": best_value,
                "best_step": result.best_step,
                "step": result.step,
                "num_steps": result.outcome.num_steps,
                "seconds": round(result.seconds, 3),
                "tokens_per_second": result.tokens_per_second,
            }
        )
    return {
        "folder": str(folder),
        "metric": objective.metric,
        "goal": "minimize" if objective.is_minimized else "maximize",
        "best": best.run.name if best is not None else None,
        "page": str(page) if page is not None else None,
        "runs": runs,
    }


def write_sweep_page(results: Sequence[SweepResult], folder: Path) -> Path | None:
    """Write the page of the best runs that have taken a step; return it, or None if fewer than two have.

    An error here is only a warning: it must not end the sweep.
    """
    runs = [result.run.folder for result in results if result.step > 0][:MAX_RUNS_ON_PAGE]
    if len(runs) < _MIN_RUNS_ON_PAGE:
        return None
    try:
        compare.write_comparison(runs, folder / PAGE)
    except Exception as error:
        print(f"warning: {folder / PAGE} cannot be written: {error}", file=sys.stderr, flush=True)
        return None
    return folder / PAGE
