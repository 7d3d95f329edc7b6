"""Where a run continues from, and how it saves itself."""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint.access import build_access
from finetune.checkpoint.checkpointer import Checkpointer
from finetune.config.run_config import RunConfig
from finetune.report.announcer import Announcer
from finetune.report.events import CheckpointSaved
from finetune.report.reporter import Reporter
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.runtime.progress import Progress


@dataclass(frozen=True)
class ReportedSaving:
    """Writes checkpoints and reports each."""

    checkpointer: Checkpointer
    reporter: Reporter

    def __call__(self, progress: Progress) -> None:
        """Write a checkpoint of this progress. Collective."""
        saved = self.checkpointer.save(progress.step, progress=progress.state_dict())
        self.reporter(CheckpointSaved(progress.step, str(saved.path), saved.size_bytes, saved.seconds))


def continue_run(
    config: RunConfig, machine: Machine, *, lessons: Lessons, say: Announcer
) -> tuple[Checkpointer, Progress]:
    """Return the checkpoints and how far the run has come, its state back in model and optimizer. Collective."""
    checkpointer = Checkpointer(
        Path(config.run.folder) / "checkpoints",
        section=config.checkpoint,
        access=build_access(machine.accelerator, machine.model, machine.optimizer),
        identity=identity(config, lessons),
        say=say,
    )
    found = checkpointer.find()
    if found is None:
        return checkpointer, Progress()
    progress = Progress.from_state_dict(checkpointer.load(found))
    say(f"continues from {found.path} after step {progress.step}")
    return checkpointer, progress


def identity(config: RunConfig, lessons: Lessons) -> dict[str, str]:
    """Return what a checkpoint must share with the run that continues it, in words fit for an error message."""
    model = config.model
    base = {"name": model.name, "revision": model.revision}
    if model.from_config is not None:
        base = model.from_config.model_dump()
    return {
        "model": json.dumps(base, sort_keys=True),
        "model.lora": json.dumps(model.lora.model_dump() if model.lora else None, sort_keys=True),
        "model.freeze": json.dumps(model.freeze),
        "training data": lessons.train_set.fingerprint,
        "data.shuffle": str(config.data.shuffle),
        "run.seed": str(config.run.seed),
        "train.global_batch_size": str(config.train.global_batch_size),
        "train.optimizer": config.train.optimizer.name,
    }
