"""`finetune train --processes N`: the job on several processes of this host, which this command starts itself."""

import os
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.rehearse.accelerate_file import data_parallel_size
from finetune.config.load import load_config, require_divisible_batch
from finetune.errors import UserError
from finetune.launch.local import run_ranks
from finetune.launch.ranks import is_launched


def train_on_ranks(config: Path, overrides: Sequence[str], *, num_processes: int, accelerate_file: Path | None) -> int:
    """Train the job, distributed as the accelerate file says, else with DDP, and return the exit code.

    A mistake in the job or in the accelerate file is raised before any process is started.
    """
    if is_launched(os.environ):
        raise UserError("--processes: a launcher has started this process already. Leave --processes out.")
    loaded = load_config(config, overrides)
    size = num_processes
    if accelerate_file is not None:
        size = data_parallel_size(accelerate_file, num_processes=num_processes)
    require_divisible_batch(loaded, num_processes=size)
    words = ["-m", "finetune", "train", "--config", str(config)]
    words += [word for override in overrides for word in ("--set", override)]
    if accelerate_file is not None:
        words += ["--accelerate", str(accelerate_file)]
    return run_ranks(words, num_processes=num_processes)
