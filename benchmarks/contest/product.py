"""The product itself: `train_from_config` on a job file, held up before each step and otherwise as it is."""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.train import loop

from contest.jobs import write_job
from contest.loading import load_workload
from contest.seat import Seat


def play(name: str, folder: Path, seat: Seat) -> None:
    """Train the workload."""
    job = write_job(folder, load_workload(folder), variant=name)
    loaded = load_config(job)
    shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with held_up(seat), patch.object(distributed, "shut_down", lambda code, **_: code):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"{job}: exit code {code}")
    for state in (GradientState, AcceleratorState, PartialState):  # the next workload builds its own
        state._reset_state()
    gc.collect()


@contextmanager
def held_up(seat: Seat) -> Iterator[None]:
    """Have every step wait for its turn where its data is at hand, and say what it learnt."""
    reach, take_step = loop.reach, loop.take_step

    def waiting(point: str, **where: Any) -> bool:
        if point == "data":
            seat.wait()
        return reach(point, **where)

    def noting(*parts: Any, **named: Any) -> Any:
        record = take_step(*parts, **named)
        seat.note(tokens=record.num_tokens, targets=record.num_targets)
        seat.losses.append(record.losses.sum() / record.num_targets)
        return record

    with patch.object(loop, "reach", waiting), patch.object(loop, "take_step", noting):
        yield
