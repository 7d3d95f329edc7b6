"""Trains tiny jobs with the product and notes what blocks of steps cost: `python flat_runs.py FOLDER`.

`plan.json` in the folder lists the runs: `{"name", "workload", "overrides", "block"}`; `figures.json` is left behind.
After each block a loop written by hand takes a few steps of the same model, so that a machine that gets slower or
faster meanwhile is seen: what counts is the cost of a block in those.
"""

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.train import loop

from contest.jobs import write_job
from contest.loading import load_model, load_workload

MEASURING_STEPS = 12
"""Of the loop by hand, after a block."""


def main(folder: Path) -> None:
    figures: dict[str, Any] = {}
    for run in json.loads((folder / "plan.json").read_text()):
        workload = folder / run["workload"]
        overrides = [f"run.folder={workload / 'runs' / run['name']}", *run["overrides"]]
        blocks = Blocks(run["block"], by_hand(workload))
        train(workload, overrides, blocks)
        found = figures.setdefault(run["name"], {"costs": [], "memory": []})
        found["costs"] += blocks.costs
        found["memory"] += blocks.memory
    (folder / "figures.json").write_text(json.dumps(figures))


class Blocks:
    """What blocks of steps have cost, and the memory that the process held after each."""

    def __init__(self, size: int, measure: Callable[[], None]) -> None:
        self._size = size
        self._measure = measure
        self._count = 0
        self._began = 0.0
        self.costs: list[float] = []  # of a step, in steps of the loop by hand
        self.memory: list[int] = []  # bytes

    def step(self) -> None:
        """Note that a step begins."""
        if self._count and self._count % self._size == 0:
            cost = (time.process_time() - self._began) / self._size
            started = time.process_time()
            self._measure()
            self.costs.append(cost * MEASURING_STEPS / (time.process_time() - started))
            self.memory.append(resident_bytes())
        if self._count % self._size == 0:
            self._began = time.process_time()
        self._count += 1


def train(workload: Path, overrides: list[str], blocks: Blocks) -> None:
    """Train the job and have its steps noted."""
    loaded = load_config(write_job(workload, load_workload(workload)), overrides)
    shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with noted(blocks), patch.object(distributed, "shut_down", lambda code, **_: code):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"exit code {code}")
    for state in (GradientState, AcceleratorState, PartialState):
        state._reset_state()
    gc.collect()


@contextmanager
def noted(blocks: Blocks) -> Iterator[None]:
    """Have every step noted where its data is at hand."""
    reach: Any = loop.__dict__["reach"]

    def noting(point: str, **where: Any) -> bool:
        if point == "data":
            blocks.step()
        return bool(reach(point, **where))

    with patch.object(loop, "reach", noting):
        yield


def by_hand(workload: Path) -> Callable[[], None]:
    """Return a few steps of a loop written by hand."""
    model = load_model(workload, load_workload(workload))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.arange(16)[None]

    def take_steps() -> None:
        for _ in range(MEASURING_STEPS):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    take_steps()
    return take_steps


def resident_bytes() -> int:
    """Return the memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve())
