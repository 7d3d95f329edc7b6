"""Old checkpoints are let go of, and what earlier prunings have left is cleared away."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from finetune.checkpoint import layout
from finetune.checkpoint.manifest import read_manifest
from finetune.checkpoint.retention import removable_steps
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.runtime.waypoints import reach


def prune(folder: Path, *, section: CheckpointSection, newest: int) -> list[str]:
    """Delete what need not be kept; `newest` has just been verified. Return what could not be deleted, as sentences."""
    kept = layout.steps(folder)
    going = removable_steps(
        kept,
        keep_last=section.keep_last,
        newest_valid=newest,
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        metrics={step: metrics_of(path) for step, path in kept.items()} if section.keep_best else {},
    )
    return let_go(folder, going)


def let_go(folder: Path, steps: Iterable[int]) -> list[str]:
    """Delete these checkpoints and what earlier deletions have left; return what could not be deleted, as sentences."""
    kept, trouble = layout.steps(folder), []
    try:
        for step in steps:
            reach("prune.rename", step=step, path=kept[step] / layout.MANIFEST)
            # Renamed first: a folder that is half deleted must not look like a checkpoint.
            layout.set_aside(kept[step], "deleted")
    except OSError as error:
        trouble.append(f"could not let go of old checkpoints: {error}")
    for path, step in layout.deleted_ones(folder).items():
        reach("prune.delete", step=step, path=path / layout.MANIFEST)
        try:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)  # of a link, the link alone
        except OSError as error:
            trouble.append(f"could not delete {path}: {error}")
    return trouble


def metrics_of(path: Path) -> Mapping[str, float]:
    """Return the metrics in the checkpoint's manifest; none where that cannot be believed."""
    try:
        return read_manifest(path).metrics
    except CheckpointError:
        return {}
