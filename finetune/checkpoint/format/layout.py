"""Names on disk: checkpoint folders, hidden folders, and renaming of damaged checkpoints. No torch.

    checkpoints/step-000400/  manifest.json index.json progress.json scalars.json model/ optimizer/

A link instead of a checkpoint folder is followed for reading; renaming and deleting affect only the link.

Random states and the schedule are not stored: seeds are derived from (seed, step, rank) in every step, and the learning
rate is a function of the step, so both depend only on the step.
"""

import os
import re
import shutil
from pathlib import Path

from finetune.runtime.files import atomic
from finetune.runtime.run_folder import own_attempt

MANIFEST = "manifest.json"
INDEX = "index.json"
PROGRESS = "progress.json"
SCALARS = "scalars.json"
METADATA_FILES = (INDEX, SCALARS, PROGRESS)
"""The files of every checkpoint in addition to its manifest and tensors."""

_STEP = re.compile(r"step-([0-9]{6,10})")
STAGING = ".staging-"
"""Beginning of the names of folders whose leftovers the next save removes."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:06d}"


def staging_folder(folder: Path, step: int) -> Path:
    """Return the hidden folder in which a step's checkpoint is written; on the same file system.

    Each attempt on a Ray cluster has its own, so that live ranks of an older attempt write elsewhere.
    """
    attempt = f"-attempt-{own_attempt()}" if own_attempt() else ""
    return folder / f"{STAGING}step-{step:06d}{attempt}"


def step_of(folder: Path) -> int | None:
    """Return the step in the folder's name; None unless it is exactly the name of `step_folder`.

    >>> [step_of(Path(name)) for name in ("step-000010", "step-0000010", "step-1e5", "step-000010 (copy)")]
    [10, None, None, None]
    """
    match = _STEP.fullmatch(folder.name)
    if match is None:
        return None
    step = int(match[1])
    return step if folder.name == step_folder(folder.parent, step).name else None


def steps(folder: Path) -> dict[int, Path]:
    """Return the folders with a checkpoint's name, by step, oldest first; their content is not checked."""
    if not folder.is_dir():
        return {}
    named = {path: step_of(path) for path in folder.iterdir() if path.is_dir()}
    return dict(sorted((step, path) for path, step in named.items() if step is not None))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder with a checkpoint's name of the highest step; None if there is none."""
    return next(reversed(steps(folder).values()), None)


def deleted_checkpoints(folder: Path) -> dict[Path, int]:
    """Return the checkpoints that are being deleted, or whose deletion was interrupted, with their steps."""
    matches = {path: _STEP.search(path.name) for path in sorted(folder.glob(".deleted-step-*"))}
    return {path: int(match[1]) for path, match in matches.items() if match is not None}


def remove_staging(folder: Path) -> None:
    """Remove leftovers of killed saves; no other process may be saving to this folder."""
    for path in folder.glob(f"{STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def rename_aside(path: Path, prefix: str) -> Path:
    """Rename the folder to `.prefix-NAME` and return the new path; nothing is deleted or overwritten.

    A link itself is renamed, not its target.
    """
    aside = path.with_name(f".{prefix}-{path.name}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f".{prefix}-{path.name}-{count}")
    path.rename(aside)
    atomic.fsync(path.parent)
    return aside
