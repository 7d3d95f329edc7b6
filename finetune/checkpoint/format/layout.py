"""Names on disk: what a checkpoint's folder is called, which folders are checkpoints, and renaming one aside. No torch.

checkpoints/step-000400/ manifest.json index.json progress.json scalars.json model/ optimizer/

A link in place of a checkpoint's folder is followed when it is read; renaming and deleting act on the link alone.

There is no folder for random states or the schedule: seeds are derived from (seed, step, rank) anew in every step and
the learning rate is a function of the step, so the step is all that either needs.
"""

import os
import re
import shutil
from pathlib import Path

from finetune.runtime.files import atomic

CHECKPOINTS = "checkpoints"
"""Of a run's folder."""

MANIFEST = "manifest.json"
INDEX = "index.json"
PROGRESS = "progress.json"
SCALARS = "scalars.json"
METADATA_FILES = (INDEX, SCALARS, PROGRESS)
"""What every checkpoint has beside its manifest and its tensors."""

_STEP = re.compile(r"step-([0-9]{6,10})")
_STAGING = ".staging-"


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return folder / f"step-{step:06d}"


def staging_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is made; hidden, on the same file system."""
    return folder / f"{_STAGING}step-{step:06d}"


def rehearsal_folder(folder: Path, token: str) -> Path:
    """Return where a save is rehearsed; what is left of it is cleared away like what is left of a save."""
    return folder / f"{_STAGING}rehearsal-{token}"


def step_of(folder: Path) -> int | None:
    """Return the step in the folder's name; None where it is not the very name that a checkpoint of a step is given.

    >>> [step_of(Path(name)) for name in ("step-000010", "step-0000010", "step-1e5", "step-000010 (copy)")]
    [10, None, None, None]
    """
    match = _STEP.fullmatch(folder.name)
    if match is None:
        return None
    step = int(match[1])
    return step if folder.name == step_folder(folder.parent, step).name else None


def steps(folder: Path) -> dict[int, Path]:
    """Return the folders that bear a checkpoint's name, by step, oldest first; whether they are whole is not asked."""
    if not folder.is_dir():
        return {}
    named = {path: step_of(path) for path in folder.iterdir() if path.is_dir()}
    return dict(sorted((step, path) for path, step in named.items() if step is not None))


def misnamed_checkpoints(folder: Path) -> list[Path]:
    """Return what is named nearly as a checkpoint and is none: a copy's name, a link to nothing, a file."""
    return [path for path in sorted(folder.glob("step-*")) if step_of(path) is None or not path.is_dir()]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the last step that bears a checkpoint's name; None where there is none."""
    return next(reversed(steps(folder).values()), None)


def bad_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that were put aside because they did not verify."""
    return sorted(folder.glob(".bad-step-*"))


def deleted_checkpoints(folder: Path) -> dict[Path, int]:
    """Return the checkpoints that are being deleted, or whose deletion was cut short, with their steps."""
    found = {path: _STEP.search(path.name) for path in sorted(folder.glob(".deleted-step-*"))}
    return {path: int(match[1]) for path, match in found.items() if match is not None}


def remove_staging(folder: Path) -> None:
    """Remove what saves that were killed have left; nobody else may be saving into this folder."""
    for path in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def rename_aside(path: Path, word: str) -> Path:
    """Rename the folder to `.word-NAME` and return the new path; nothing is deleted or overwritten.

    Of a link it is the link that is renamed.
    """
    aside = path.with_name(f".{word}-{path.name}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f".{word}-{path.name}-{count}")
    path.rename(aside)
    atomic.fsync(path.parent)
    return aside
