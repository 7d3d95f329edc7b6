"""`finetune check`: all problems of a job file at once, and what the job will do."""

from collections.abc import Sequence
from pathlib import Path

from finetune.config.explain import format_summary
from finetune.config.load import load_config, require_divisible_batch
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.rehearse import accelerate_file as accelerate_files
    from finetune.run.setup import model


def check(
    path: Path,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    accelerate_file: Path | None = None,
    tries_model: bool = False,
) -> None:
    """Print what the job will do; raises ConfigError with every problem, ModelError for the model that was tried.

    Raises StrategyError for an accelerate file that cannot be launched, or not with this number of processes.
    """
    loaded = load_config(path, overrides)
    if accelerate_file is not None:
        num_processes = accelerate_files.data_parallel_size(accelerate_file, num_processes=num_processes)
    if num_processes is not None:
        require_divisible_batch(loaded, num_processes=num_processes)
    if tries_model:
        model.require_buildable(loaded)
        model.require_adaptable(loaded)
        model.require_routers(loaded)
    warning = model.require_positions(loaded) if tries_model else None
    print(f"{path.name} is ready.")
    for line in format_summary(loaded.config, num_processes=num_processes):
        print(f"  {line}")
    if warning is not None:
        print(f"  warning: {warning}")
