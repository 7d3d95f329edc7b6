"""The start of `finetune train`: nothing slow is imported before the config and the run folder are checked."""

import os
from collections.abc import Sequence
from pathlib import Path

from finetune.config.load import load_config
from finetune.runtime.optional import lazily

with lazily():  # not needed for a job with a mistake
    from finetune.report import reporter
    from finetune.run.state import preflight

with lazily(freeze=True):  # torch
    from finetune.run import train
    from finetune.strategy import launch_file


def start(path: Path, overrides: Sequence[str], *, accelerate_file: Path | None = None) -> int:
    """Train the job, distributed as the accelerate file says if one is given, and return the exit code.

    The checksums of the checkpoint that the run will resume from are computed while torch is being imported.
    """
    loaded = load_config(path, overrides)
    code = preflight.preflight(loaded)
    if code is not None:
        return code
    preflight.use_expandable_segments()
    checksums = preflight.prefetch_checksums(loaded)
    if accelerate_file is not None:
        for sentence in launch_file.use_launch_file(accelerate_file):
            reporter.RunLog(is_main=os.environ.get("RANK", "0") == "0")(sentence)
    return train.train_from_config(loaded, checksums)
