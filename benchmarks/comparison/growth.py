"""Topic 7: what a step costs does not grow with the steps done, the documents there are, or the checkpoints kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.controller import run_script
from comparison.results import Log, PartResults, Result, Spread, Table
from comparison.steps import make
from comparison.workloads import TINY, Form, Workload

FEW, MANY = 400, 40_000
"""Documents."""
KEPT = (2, 50)
"""Checkpoints."""
NUM_COUNTED = 30
"""Saves at the end of a run, when all that are to be kept exist: two in a block of steps."""
SAVING = [f"train.steps={4 * (max(KEPT) + NUM_COUNTED)}", "checkpoint.every_steps=4"]
THRESHOLD = 1.03

Figures = Mapping[str, Mapping[str, Sequence[float]]]


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return by how much each of them makes a step slower."""
    folder = folder.resolve()
    steps = form.choose(10_000, 1000, 200)
    make(folder, [_documents("few", FEW), _documents("many", form.choose(MANY, MANY, 2 * FEW))], data=folder, seed=0)
    (folder / "runs.json").write_text(json.dumps(runs(steps, turns=form.choose(5, 1, 1))))
    figures: dict[str, Any] = run_script("comparison.growth_worker", folder, seconds=1800)
    found = results(figures, steps)
    for each in found:
        log(f"{each.what}: {each.spread}")
    return PartResults(found, [_table(figures)], figures)


def runs(steps: int, *, turns: int) -> list[dict[str, Any]]:
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


def results(figures: Figures, steps: int) -> list[Result]:
    """Return the later against the earlier, and the more against the fewer."""
    first, last = tenths(figures["steps"]["costs"])
    note = f"{steps} steps of 16 tokens; CPU-time in blocks, each against steps of a bare loop beside it"
    memory_first, memory_last = tenths([float(each) for each in figures["steps"]["memory"]])
    few, many = figures["few documents"]["costs"], figures["many documents"]["costs"]
    less, more = (last_of_turns(figures[f"{count} kept"]["costs"]) for count in KEPT)
    saved = f"CPU-time of 8 steps and 2 saves, {KEPT[1]} kept / {KEPT[0]}"
    return [
        _result("steps done: CPU-time a step, last tenth / first", last, first, note),
        _result("steps done: resident memory, last tenth / first", memory_last, memory_first, note),
        _result(f"documents: CPU-time a step, {MANY:,} / {FEW}", many, few, note),
        _result(f"checkpoints: {saved}", more, less, "a save every 4 steps, in the background"),
    ]


def _result(what: str, above: Sequence[float], below: Sequence[float], note: str) -> Result:
    return Result(7, what, Spread.of_ratios(above, below), THRESHOLD, "lower", note=note)


def tenths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last tenth, without the very first blocks: there everything is new."""
    count = max(1, len(values) // 10)
    start = min(2, len(values) - count)
    return values[start : start + count], values[-count:]


def last_of_turns(values: Sequence[float]) -> Sequence[float]:
    """Return the last blocks of each turn: by then all checkpoints that are to be kept exist."""
    size = (max(KEPT) + NUM_COUNTED) // 2 - 1  # no step follows the last block of a turn, so its end is not seen
    turns = [values[start : start + size] for start in range(0, len(values), size)]
    return [each for turn in turns for each in turn[1 - NUM_COUNTED // 2 :]]


def _documents(name: str, count: int) -> Workload:
    return Workload(name, f"{count} documents", (), count - 2, "fixed", TINY, 16, 16, 1, 1)


def _table(figures: Figures) -> Table:
    rows = [
        (name, str(len(run["costs"])), str(Spread.of(run["costs"])), f"{run['memory'][-1] / 1e6:,.0f}")
        for name, run in figures.items()
    ]
    header = ("run", "blocks", "cost of a step, in steps of a bare loop", "resident MB at the end")
    return Table("Cost of a step over time (16 tokens)", header, rows)
