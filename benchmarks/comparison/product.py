"""finetune as the comparison runs it: the one module here that uses more of it than its commands."""

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.config.load import load_config
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext
from finetune.run.setup.strategy import launched_strategy
from finetune.run.setup.training_data import prepare_data
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.train import loop, step

PHASES: Mapping[str, str] = {"forward": "forward", "backward": "backward", "update.after": "update"}
"""Points of a step, and the phases that end there."""


@contextmanager
def observed(
    *,
    begin: Callable[[], object],
    end: Callable[[Any], object] = lambda record: None,
    phase: Callable[[str], object] = lambda name: None,
) -> Iterator[None]:
    """Have every step call `begin` when its data has come, `phase` when a phase ends, and `end` with its record."""
    fault_point, take_step = step.fault_point, loop.take_step

    def observed_point(point: str, **where: Any) -> bool:
        if point == "data":
            begin()
        elif point in PHASES:
            phase(PHASES[point])
        return fault_point(point, **where)

    def taking(*parts: Any, **named: Any) -> Any:
        record = take_step(*parts, **named)
        end(record)
        return record

    with (
        patch.object(step, "fault_point", observed_point),
        patch.object(loop, "take_step", taking),
    ):
        yield


def train(job: Path, overrides: Sequence[str] = (), *, resumes: bool = False) -> None:
    """Train the job, from the start unless it resumes; the process and its group of ranks live on."""
    loaded = load_config(job, overrides)
    if distributed.is_main() and not resumes:
        shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with patch.object(distributed, "shut_down", _stay):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"{job}: exit code {code}")
    if not distributed.is_distributed():
        for state in (GradientState, AcceleratorState, PartialState):  # the next job builds its own
            state._reset_state()
    gc.collect()


def _stay(code: int, **_: object) -> int:
    """Take the place of `shut_down`: the others are waited for, and the process group stays."""
    if distributed.is_distributed():
        torch.distributed.barrier()
    return code


def samples_of(job: Path) -> Any:
    """Return the job's training samples, tokenized and in the order of its file."""
    loaded = load_config(job)
    context = RunContext(loaded, launched_strategy(loaded), RunLog(is_main=distributed.is_main()))
    return prepare_data(context).training_data.training.samples


def run_folder(folder: Path) -> str:
    """Return the override that makes the folder the run's."""
    return f"run.folder={json.dumps(str(folder))}"
