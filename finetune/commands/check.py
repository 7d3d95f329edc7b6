"""`finetune check`: all problems of a job file at once, or what it will do."""

from collections.abc import Sequence
from pathlib import Path

from finetune.config.explain import format_summary
from finetune.config.load import load_config, require_divisible_batch
from finetune.runtime.optional import lazily
from finetune.runtime.text.terminal import quiet_libraries

with lazily(freeze=True):  # torch
    from finetune.commands.rehearse import accelerate_file as accelerate_files
    from finetune.run.setup import model_checks, strategy


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
    num_launched = num_processes
    notes: Sequence[str] = ()
    if accelerate_file is not None:
        notes = accelerate_files.read_accelerate_file(accelerate_file).notes
        num_processes = accelerate_files.data_parallel_size(accelerate_file, num_processes=num_processes)
    if num_processes is not None:
        require_divisible_batch(loaded, num_processes=num_processes)
    of_model: Sequence[str] = ()
    if tries_model:
        quiet_libraries(is_main=True)
        launched = None
        if accelerate_file is not None:
            launched = strategy.strategy_of_file(loaded, accelerate_file, num_processes=num_launched)
        of_model = model_checks.check_model(model_checks.CheckedJob(loaded, launched))
    print(f"{path.name} is ready.")
    for line in (*format_summary(loaded.config, num_processes=num_processes), *notes, *of_model):
        print(f"  {line}")
