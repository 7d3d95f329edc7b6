"""The start of `finetune train`: nothing slow is imported before the config and the run folder are checked."""

from collections.abc import Sequence
from pathlib import Path

from finetune.config.load import load_config
from finetune.run.allocator import use_expandable_segments
from finetune.run.state.preflight import prefetch_checksums, preflight
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.run import train


def start(path: Path, overrides: Sequence[str]) -> int:
    """Train as the job file says and return the exit code.

    The checksums of the checkpoint that the run will resume from are computed while torch is being imported.
    """
    loaded = load_config(path, overrides)
    code = preflight(loaded)
    if code is not None:
        return code
    use_expandable_segments()
    checksums = prefetch_checksums(loaded)
    return train.train_from_config(loaded, checksums)
