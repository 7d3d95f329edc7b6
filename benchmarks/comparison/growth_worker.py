"""Trains tiny jobs with the product and measures blocks of their steps: `python -m comparison.growth_worker FOLDER`.

`runs.json` in the folder lists the runs: `{"name", "workload", "overrides", "block"}`; `figures.json` is left there.
After each block a loop written by hand takes a few steps of the same model, so that a machine that gets slower or
faster meanwhile is seen: a block's cost is counted in those.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from comparison.data import load_model, load_workload
from comparison.jobs import write_job
from comparison.product import observed, run_folder, train
from comparison.worker import memory_bytes

REFERENCE_STEPS = 12
"""Of the loop by hand, after a block."""


def main(folder: Path) -> None:
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
    model = load_model(workload, load_workload(workload))
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
