"""What a run's folder says of a run that is over: read as JSON alone, before anything that trains is imported."""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint import layout
from finetune.checkpoint.changes import told_changes
from finetune.checkpoint.facts import RunFacts
from finetune.checkpoint.manifest import Manifest, read_manifest
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.errors import CheckpointError
from finetune.runtime.progress import Progress
from finetune.train.early_stopping import EARLY, FINISHED, EarlyStopping

FOLDER = "final"
RECORD = "final.json"
"""Which step `final/` is from, why the run was over then, what `export:` said, the sizes of its files, its inputs."""

BEST_IS_OF = ("train.early_stopping", "train.early_stopping.metric", "train.early_stopping.goal")
"""What early stopping remembers means nothing once one of these has changed."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that needs nothing more."""

    checkpoint: Path
    progress: Progress
    reason: str


def over_on_disk(config: RunConfig, *, num_steps: int) -> tuple[FinishedRun, Manifest] | None:
    """Return the run if its last checkpoint is whole by size, the last of the run, and `final/` is from it."""
    if config.checkpoint.resume != "auto":
        return None
    folder = Path(config.run.folder)
    path = layout.newest(folder / layout.CHECKPOINTS)
    try:
        if path is None or not is_whole(path, manifest := read_manifest(path)):
            return None
        progress = Progress.from_state_dict(json.loads((path / layout.PROGRESS).read_text(encoding="utf-8")))
    except (CheckpointError, OSError, ValueError):
        return None
    reason = _over_because(config, progress, num_steps=num_steps)
    if reason is None or not is_exported(folder, step=progress.step, section=config.export):
        return None
    return FinishedRun(path, progress, reason), manifest


def told_over(config: RunConfig, finished: FinishedRun, saved: RunFacts, *, wanted: RunFacts) -> list[str] | None:
    """Return what there is to say of a run that is over; None where it is not: its best is of another metric.

    Raises CheckpointError where the config is no longer the one it was trained with.
    """
    if finished.reason == EARLY and any(wanted.settings.get(key) != saved.settings.get(key) for key in BEST_IS_OF):
        return None
    sentences = told_changes(finished.checkpoint, saved, wanted=wanted, allowed=config.checkpoint.allow_changes)
    final = Path(config.run.folder) / FOLDER
    step = finished.progress.step
    return [*sentences, f"nothing to do: {finished.reason} at step {step}, and the model is in {final}"]


def is_exported(run_folder: Path, *, step: int, section: ExportSection) -> bool:
    """Tell whether `final/` was exported so after this step, and each of its files still has the size it had then."""
    try:
        record = json.loads((run_folder / RECORD).read_text(encoding="utf-8"))
        sizes = {name: (run_folder / FOLDER / name).stat().st_size for name in record["files"]}
        return bool(record["step"] == step and record["export"] == section.model_dump() and record["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_whole(path: Path, manifest: Manifest) -> bool:
    """Tell whether every file of the checkpoint has its size; raises OSError for one that is not there."""
    return all((path / name).stat().st_size == facts.size_bytes for name, facts in manifest.files.items())


def _over_because(config: RunConfig, progress: Progress, *, num_steps: int) -> str | None:
    section = config.train.early_stopping
    if section is not None and EarlyStopping(section).is_over(progress):
        return EARLY
    return FINISHED if progress.step >= num_steps else None
