"""The product as one rank of several: `train_from_config`, held up before each step."""

import shutil
from pathlib import Path
from unittest.mock import patch

import torch

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed

from contest.product import held_up
from contest.seat import Seat


def play(strategy: str, folder: Path, seat: Seat) -> None:
    """Train the workload under the strategy."""
    loaded = load_config(folder / "pair.yaml", [f"run.folder={folder / 'runs' / strategy}"])
    if distributed.is_main():
        shutil.rmtree(loaded.config.run.folder, ignore_errors=True)
    with held_up(seat), patch.object(distributed, "shut_down", _stay):
        code = train_from_config(loaded)
    if code != 0:
        raise RuntimeError(f"{strategy}: exit code {code}")


def _stay(code: int, **_: object) -> int:
    """Take the place of `ranks.leave`: the others are waited for, and the group goes on."""
    torch.distributed.barrier()
    return code
