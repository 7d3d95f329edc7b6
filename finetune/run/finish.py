"""From the first step to what the run leaves behind."""

import time
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.report.events import RunEnded
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.runtime.progress import Progress
from finetune.train.loop import FINISHED, train
from finetune.train.parts import Parts

EXPORTED_AFTER = (FINISHED, "early stopping")
"""Why a run may end so that its model is final; after a signal or a limit it is to be continued."""

EXIT_CODES = {"signal SIGTERM": 143, "signal SIGINT": 130}
"""As a shell counts them; every other end is a success."""


def train_to_the_end(config: RunConfig, parts: Parts, *, progress: Progress, lessons: Lessons, machine: Machine) -> int:
    """Train, export the model where the run is over, report the end and return the exit code. Collective."""
    started = time.monotonic()
    if config.evaluate is not None and config.evaluate.at_start and progress.step == 0:
        parts.evaluate(progress.step)
    reason = train(parts, progress)
    final = Path(config.run.folder) / "final"
    if reason in EXPORTED_AFTER:
        _export(config, parts, progress=progress, lessons=lessons, machine=machine, folder=final)
    parts.reporter(
        RunEnded(
            step=progress.step,
            reason=reason,
            seconds=time.monotonic() - started,
            metrics=progress.last_metrics,
            final_folder=str(final) if reason in EXPORTED_AFTER else None,
        )
    )
    return EXIT_CODES.get(reason, 0)
