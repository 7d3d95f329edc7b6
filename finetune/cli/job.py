"""What the commands about a job file do. Imported when one of them is typed: pydantic is not needed for `--help`."""

from collections.abc import Sequence
from pathlib import Path

from finetune.cli import lazy
from finetune.config.explain import format_summary
from finetune.config.load import load_config, require_divisible_batch


def train_job(path: Path, overrides: Sequence[str]) -> int:
    """Train as the job file says and return the exit code; nothing slow is imported before the file is right.

    What the run will continue from is read while that is imported.
    """
    loaded = load_config(path, overrides)
    code = lazy.call("finetune.run.state.preflight:preflight", loaded)
    if code is not None:
        return int(code)
    ahead = lazy.call("finetune.run.state.preflight:prefetch_checksums", loaded)
    return int(lazy.call("finetune.run.train:train_from_config", loaded, ahead))


def check_job(path: Path, overrides: Sequence[str], *, num_processes: int | None, tries_model: bool = False) -> None:
    """Print what the job will do; raises ConfigError with everything that is wrong, ModelError for the model tried."""
    loaded = load_config(path, overrides)
    if num_processes is not None:
        require_divisible_batch(loaded, num_processes=num_processes)
    if tries_model:
        lazy.call("finetune.run.build.model:require_buildable", loaded.config)
    print(f"{path.name} is ready.")
    for line in format_summary(loaded.config, num_processes=num_processes):
        print(f"  {line}")
