"""`finetune check`: all problems of a job file at once, or what it will do."""

from collections.abc import Sequence
from pathlib import Path

from finetune.config.explain import format_summary, resolved_yaml
from finetune.config.load import (
    RESOLVED_NAME,
    load_config,
    load_resolved,
    require_divisible_batch,
)
from finetune.runtime.optional import lazily
from finetune.runtime.text.terminal import quiet_libraries

with lazily(freeze=True):  # torch
    from finetune.commands.compare import runs as compared_runs
    from finetune.commands.rehearse import accelerate_file as accelerate_files
    from finetune.run.setup import model_checks, strategy

_DEFAULT = "default"
"""The source in resolved.yaml of a value that was not written."""


def check(
    path: Path,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    accelerate_file: Path | None = None,
    run: Path | None = None,
    tries_model: bool = False,
) -> None:
    """Print what the job will do; raises ConfigError with every problem, ModelError for the model that was tried.

    With a run folder, also print the keys that neither the job nor the run has written and whose defaults have changed
    since that run. Raises StrategyError for an accelerate file that cannot be launched, or not with this number of
    processes.
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
    if run is not None:
        load_resolved(run)  # raises UserError if it cannot be read
        then = dict(compared_runs.config_values((run / RESOLVED_NAME).read_text(encoding="utf-8")))
        lines = []
        for key, (value, source) in compared_runs.config_values(resolved_yaml(loaded)):
            before, source_before = then.get(key, (value, ""))
            if (source, source_before) == (_DEFAULT, _DEFAULT) and before != value:
                lines.append(f"{key}: {before} then, {value} now")
        print(f"defaults that have changed since {run}: {'none' if not lines else ''}".rstrip())
        for line in lines:
            print(f"  {line}")
