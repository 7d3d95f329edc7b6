"""Tiny runs in the test's own process, each trained once per session."""

import functools
from pathlib import Path
from unittest.mock import patch

from accelerate.state import AcceleratorState, GradientState, PartialState

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed

LORA = "model.lora={rank: 4, alpha: 8.0}"
OVERRIDES = {"full": (), "lora": (LORA,), "merged": (LORA, "export.merge=true")}


def stay(code, **_):
    """Take the place of `distributed.shut_down`: what it would do afterwards is done, and the process goes on."""
    return code


def forget():
    """Forget the Accelerator, so that the next one is built anew."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=False)
    PartialState._reset_state()


def train_here(job: Path, *overrides: str) -> None:
    """Train the job in this process, which goes on afterwards."""
    try:
        with patch.object(distributed, "shut_down", stay):
            train_from_config(load_config(job, list(overrides)))
    finally:
        forget()


@functools.cache
def run_folder(job: Path, name: str) -> Path:
    """Return the folder of the finished run of that name."""
    folder = job.parent / "runs" / f"trained-{name}"
    quick = ["train.steps=4", "checkpoint.every_steps=2", "evaluate.every_steps=2", "train.microbatch_size=2"]
    train_here(job, f"run.folder={folder}", *quick, *OVERRIDES[name])
    return folder
