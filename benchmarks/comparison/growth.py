"""Topic 7: what a step costs does not grow with the steps done, the documents there are, or the checkpoints kept.

`python -m comparison.growth FOLDER` trains tiny jobs with the product and measures blocks of their steps. After each
block a loop written by hand takes a few steps of the same model, so that a machine that gets slower or faster meanwhile
is seen: a block's cost is counted in those.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comparison.controller import run_script
from comparison.data import load_model, load_workload
from comparison.jobs import write_job
from comparison.product import observed, run_folder, train
from comparison.results import Log, PartResults, Result, Spread
from comparison.steps import make
from comparison.worker import memory_bytes
from comparison.workloads import TINY, Form, Workload

FEW, MANY = 400, 40_000
"""Documents."""
KEPT = (2, 50)
"""Checkpoints."""
NUM_COUNTED = 30
"""Saves at the end of a run, when all that are to be kept exist: two in a block of steps."""
SAVING = [f"train.steps={4 * (max(KEPT) + NUM_COUNTED)}", "checkpoint.every_steps=4"]
THRESHOLD = 1.03

REFERENCE_STEPS = 12
"""Of the loop by hand, after a block."""

Figures = Mapping[str, Mapping[str, Sequence[float]]]


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return by how much each of them makes a step slower."""
    folder = folder.resolve()
    steps = form.choose(10_000, 1000, 200)
    make(folder, [_documents("few", FEW), _documents("many", form.choose(MANY, MANY, 2 * FEW))], data=folder)
    (folder / "runs.json").write_text(json.dumps(runs(steps, turns=form.choose(5, 1, 1))))
    figures: dict[str, Any] = run_script("comparison.growth", folder, seconds=1800)
    found = results(figures, steps)
    for each in found:
        log(f"{each.what}: {each.spread}")
    return PartResults(found, [], figures)


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


def main(folder: Path) -> None:
    """Train the runs of `runs.json` and leave `figures.json`."""
    figures: dict[str, Any] = {}
    for run in json.loads((folder / "runs.json").read_text()):
        workload = folder / run["workload"]
        blocks = Blocks(run["block"], reference_of(workload))
        with observed(begin=blocks.step):
            job = write_job(workload, load_workload(workload))
            train(job, [run_folder(workload / "runs" / run["name"]), *run["overrides"]])
        found = figures.setdefault(run["name"], {"costs": [], "memory": []})
        found["costs"] += blocks.costs
        found["memory"] += blocks.memory
    (folder / "figures.json").write_text(json.dumps(figures))


class Blocks:
    """What blocks of steps have cost, and the memory of the process after each."""

    def __init__(self, size: int, take_reference_steps: Callable[[], None]) -> None:
        self._size = size
        self._take_reference_steps = take_reference_steps
        self._count = 0
        self._started = 0.0
        self.costs: list[float] = []  # of a step, in steps of the loop by hand
        self.memory: list[int] = []  # bytes

    def step(self) -> None:
        """Note that a step begins."""
        if self._count and self._count % self._size == 0:
            cost = (time.process_time() - self._started) / self._size
            started = time.process_time()
            self._take_reference_steps()
            self.costs.append(cost * REFERENCE_STEPS / (time.process_time() - started))
            self.memory.append(memory_bytes("VmRSS"))
        if self._count % self._size == 0:
            self._started = time.process_time()
        self._count += 1


def reference_of(workload: Path) -> Callable[[], None]:
    """Return a few steps of a loop written by hand."""
    model = load_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.arange(16)[None]

    def take_steps() -> None:
        for _ in range(REFERENCE_STEPS):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    take_steps()
    return take_steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve())
