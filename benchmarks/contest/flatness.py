"""Gate 7: what a step costs does not grow with the steps done, the documents there are, or the checkpoints kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contest.evaluation import run_worker
from contest.finding import Finding, Spread
from contest.measured import Measured, Say, Table
from contest.steps import make
from contest.workloads import TINY, Workload

FEW, MANY = 400, 40_000
"""Documents."""
KEPT = (2, 50)
"""Checkpoints."""
COUNTED = 30
"""Saves at the end of a run, when all that are to be kept are there: two in a block of steps."""
SAVING = [f"train.steps={4 * (max(KEPT) + COUNTED)}", "checkpoint.every_steps=4"]
LIMIT = 1.03

Figures = Mapping[str, Mapping[str, Sequence[float]]]


def measure(folder: Path, *, is_quick: bool, say: Say) -> Measured:
    """Return gate 7."""
    folder = folder.resolve()
    steps = 1000 if is_quick else 10_000
    make(folder, [_documents("few", FEW), _documents("many", MANY)], data=folder, seed=0)
    (folder / "plan.json").write_text(json.dumps(plan(steps, turns=1 if is_quick else 5)))
    figures: dict[str, Any] = run_worker("flat_runs.py", folder, seconds=1800)
    found = findings(figures, steps)
    for each in found:
        say(f"{each.what}: {each.spread}")
    return Measured(found, [_table(figures)], figures)


def plan(steps: int, *, turns: int) -> list[dict[str, Any]]:
    """Return the runs in order; those that are compared take turns."""
    long = {"name": "steps", "workload": "few", "overrides": [f"train.steps={steps}"], "block": max(10, steps // 100)}
    short = [
        {"name": name, "workload": workload, "overrides": ["train.steps=260", f"data.train.take={count}"], "block": 20}
        for _ in range(turns)
        for name, workload, count in (("few documents", "few", FEW), ("many documents", "many", MANY))
    ]
    saving = [
        {
            "name": f"{count} kept",
            "workload": "few",
            "overrides": [*SAVING, f"checkpoint.keep_last={count}"],
            "block": 8,
        }
        for _ in range(turns)
        for count in KEPT
    ]
    return [long, *short, *saving]


def findings(figures: Figures, steps: int) -> list[Finding]:
    """Return what the runs say."""
    first, last = tenths(figures["steps"]["costs"])
    note = f"{steps} steps of 16 tokens; CPU-time in blocks, each against steps of a bare loop beside it"
    memory = [float(each) for each in figures["steps"]["memory"]]
    held, end = tenths(memory)
    few, many = figures["few documents"]["costs"], figures["many documents"]["costs"]
    less, more = (last_of_turns(figures[f"{count} kept"]["costs"]) for count in KEPT)
    saved = f"CPU-time of 8 steps and 2 saves, {KEPT[1]} kept / {KEPT[0]}"
    return [
        _finding("steps done: CPU-time a step, last tenth / first", last, first, note),
        _finding("steps done: resident memory, last tenth / first", end, held, note),
        _finding(f"documents: CPU-time a step, {MANY:,} / {FEW}", many, few, note),
        _finding(f"checkpoints: {saved}", more, less, "a save every 4 steps, written behind the training"),
    ]


def _finding(what: str, above: Sequence[float], below: Sequence[float], note: str) -> Finding:
    return Finding(7, what, Spread.of_ratios(above, below), LIMIT, "lower", note=note)


def tenths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last tenth, without the very first blocks: there everything is new."""
    count = max(1, len(values) // 10)
    start = min(2, len(values) - count)
    return values[start : start + count], values[-count:]


def last_of_turns(values: Sequence[float]) -> Sequence[float]:
    """Return the last blocks of each turn: by then all that are to be kept are there."""
    size = (max(KEPT) + COUNTED) // 2 - 1  # the last block of a turn has no step behind it that would end it
    turns = [values[start : start + size] for start in range(0, len(values), size)]
    return [each for turn in turns for each in turn[1 - COUNTED // 2 :]]


def _documents(name: str, count: int) -> Workload:
    return Workload(name, f"{count} documents", (), count - 2, "fixed", TINY, 16, 16, 1, 1)


def _table(figures: Figures) -> Table:
    rows = [
        (name, str(len(run["costs"])), str(Spread.of(run["costs"])), f"{run['memory'][-1] / 1e6:,.0f}")
        for name, run in figures.items()
    ]
    header = ("run", "blocks", "cost of a step, in steps of a bare loop", "resident MB at the end")
    return Table("Flat cost of a step (16 tokens)", header, rows)
