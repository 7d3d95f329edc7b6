"""The results of a sweep: a table with the best run first, how the best is used, and all of it as JSON."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from finetune.commands.sweep.plan.axes import shown_value
from finetune.commands.sweep.plan.names import short_keys
from finetune.commands.sweep.results.ranking import Objective, RunResult, best_of
from finetune.commands.sweep.state.outcome import FAILED, FINISHED, PRUNED
from finetune.report.console import format_duration
from finetune.runtime.text.redact import redacted_command, redacted_config

ABSENT = "-"


def results_table(results: Sequence[RunResult], objective: Objective, *, swept: Sequence[str]) -> Table:
    """Return a row for each run in this order."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in short_keys(list(swept)).values():
        table.add_column(label, overflow="fold")
    for column in (objective.metric, "best", "at step", "steps", "time", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for each in results:
        table.add_row(
            *(_value(each.values[key]) if key in each.values else ABSENT for key in swept),
            _number(each.final),
            _number(each.best),
            ABSENT if each.best_step is None else str(each.best_step),
            f"{each.step}/{each.outcome.num_steps}" if each.outcome.num_steps else ABSENT,
            format_duration(each.seconds) if each.seconds else ABSENT,
            f"{each.tokens_per_second:,.0f}" if each.tokens_per_second is not None else ABSENT,
            _status(each),
        )
    return table


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown_value(value)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def _status(result: RunResult) -> Text:
    first = next(iter(result.outcome.message.splitlines()), "")
    style = {FINISHED: "green", FAILED: "red"}.get(result.outcome.state, "")
    return Text(f"{result.outcome.state}: {first}" if first else result.outcome.state, style)


def closing_lines(
    results: Sequence[RunResult], objective: Objective, *, job: Path, again: Sequence[str]
) -> Iterator[str]:
    """Yield what is best and how it is used, and what is left to do; `again` is the command that continues."""
    best = best_of(results)
    if best is not None:
        yield f"best: {best.name}, {objective.metric} {_number(best.final)} after step {best.step}"
        if best.best_step not in (None, best.step) and best.best != best.final:
            yield f"  it was {_number(best.best)} at step {best.best_step}"
        yield f"  its model: {best.folder / 'final'}"
        yield f"  export it: {shlex.join(['finetune', 'export', str(best.folder), '--to', 'FOLDER'])}"
        words = redacted_command(["finetune", "--config", str(job), *_options(best)])
        yield f"  train with its values: {shlex.join(words)}"
    states = [each.outcome.state for each in results]
    failed = [each for each in results if each.outcome.state == FAILED]
    for each in failed:
        yield f"failed: {each.name}: {each.outcome.message}"
    if failed:
        yield f"after a fix, start the failed runs again: {shlex.join([*again, '--retry-failed'])}"
    open_runs = sum(state not in (FINISHED, FAILED, PRUNED) for state in states)
    if open_runs:
        yield f"{open_runs} of {len(states)} runs are not finished; the same command continues: {shlex.join(again)}"


def _options(best: RunResult) -> list[str]:
    return [word for override in best.overrides for word in ("--set", override)]


def results_json(
    results: Sequence[RunResult], objective: Objective, *, folder: Path, page: Path | None
) -> dict[str, Any]:
    """Return the sweep as plain JSON values; a number that is not finite is a text."""
    best = best_of(results)
    return {
        "folder": str(folder),
        "metric": objective.metric,
        "goal": "minimize" if objective.is_minimized else "maximize",
        "best": best.name if best is not None else None,
        "page": str(page) if page is not None else None,
        "runs": [_json(each) for each in results],
    }


def _json(result: RunResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "values": redacted_config(dict(result.values)),
        "folder": str(result.folder),
        "state": result.outcome.state,
        "message": result.outcome.message or None,
        "final": _plain(result.final),
        "best": _plain(result.best),
        "best_step": result.best_step,
        "step": result.step,
        "num_steps": result.outcome.num_steps,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": result.tokens_per_second,
    }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
