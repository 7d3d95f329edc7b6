"""The choice of old checkpoints to delete, and their deletion. No torch."""

import shutil
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest
from finetune.config.sections.checkpoint import CheckpointSection, KeepBestSection
from finetune.errors import CheckpointError
from finetune.runtime.run_folder import require_newest_attempt
from finetune.runtime.supervision.heartbeat import fault_point

NO_METRICS: Mapping[int, Mapping[str, float]] = {}


def removable_steps(
    steps: Iterable[int],
    *,
    keep_last: int,
    newest_valid: int,
    keep_every_steps: int | None = None,
    keep_best: KeepBestSection | None = None,
    metrics: Mapping[int, Mapping[str, float]] = NO_METRICS,
) -> list[int]:
    """Return the steps whose checkpoints may be deleted, oldest first; the newest valid one is never among them.

    Kept are the `keep_last` newest up to the newest valid one, the multiples of `keep_every_steps` and the best. Steps
    after the newest valid one are never returned.
    """
    past = sorted(step for step in steps if step <= newest_valid)
    kept = {newest_valid, *past[-keep_last:]}
    if keep_every_steps is not None:
        kept.update(step for step in past if step % keep_every_steps == 0)
    if keep_best is not None:
        kept.update(best_steps({step: metrics.get(step, {}) for step in past}, keep_best))
    return [step for step in past if step not in kept]


def best_steps(metrics: Mapping[int, Mapping[str, float]], section: KeepBestSection) -> list[int]:
    """Return the best steps by their metrics, the best first, and later ones first among equals.

    A checkpoint that was not evaluated at exactly its step, or whose metric is not finite, is not considered.
    """
    sign = 1 if section.goal == "minimize" else -1
    values = {step: sign * row[section.metric] for step, row in metrics.items() if section.metric in row}
    candidates = [step for step, value in values.items() if isfinite(value)]
    return sorted(candidates, key=lambda step: (values[step], -step))[: section.count]


def prune_checkpoints(folder: Path, *, section: CheckpointSection, newest: int) -> list[str]:
    """Delete checkpoints that the section does not keep; `newest` was verified. Return failures, as sentences."""
    require_newest_attempt()
    saved = layout.steps(folder)
    removable = removable_steps(
        saved,
        keep_last=section.keep_last,
        newest_valid=newest,
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        metrics={step: checkpoint_metrics(path) for step, path in saved.items()} if section.keep_best else {},
    )
    return delete_checkpoints(folder, removable)


def delete_checkpoints(folder: Path, steps: Iterable[int]) -> list[str]:
    """Delete these checkpoints and leftovers of interrupted deletions; return failures, as sentences."""
    saved, failures = layout.steps(folder), []
    try:
        for step in steps:
            fault_point("prune.rename", step=step, path=saved[step] / layout.MANIFEST)
            # Renamed first: a partly deleted folder must not look like a checkpoint.
            layout.rename_aside(saved[step], "deleted")
    except OSError as error:
        failures.append(f"could not delete old checkpoints: {error}")
    for path, step in layout.deleted_checkpoints(folder).items():
        fault_point("prune.delete", step=step, path=path / layout.MANIFEST)
        try:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)  # of a link, only the link itself
        except OSError as error:
            failures.append(f"could not delete {path}: {error}")
    return failures


def checkpoint_metrics(path: Path) -> Mapping[str, float]:
    """Return the metrics in the checkpoint's manifest; none if it is invalid."""
    try:
        return read_manifest(path).metrics
    except CheckpointError:
        return {}
