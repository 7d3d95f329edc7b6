"""Names on disk: what a checkpoint's folder is called, which folders are checkpoints, and what is put aside.

    checkpoints/step-000400/  manifest.json index.json progress.json scalars.json model/ optimizer/

There is no folder for random states or the schedule: seeds are derived from (seed, step, rank) anew in every step and
the learning rate is a function of the step, so the step is all that either needs.
"""

import re
import shutil
from pathlib import Path

from finetune.runtime import files

MANIFEST = "manifest.json"
INDEX = "index.json"
PROGRESS = "progress.json"
SCALARS = "scalars.json"

_STEP = re.compile(r"step-(\d{6,})")
_STAGING = ".staging-"


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return folder / f"step-{step:06d}"


def staging_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is made; hidden, on the same file system."""
    return folder / f"{_STAGING}step-{step:06d}"


def steps(folder: Path) -> dict[int, Path]:
    """Return the folders that bear a checkpoint's name, by step, oldest first; whether they are whole is not asked."""
    if not folder.is_dir():
        return {}
    named = {path: _STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()}
    return dict(sorted((int(match[1]), path) for path, match in named.items() if match))


def bad_ones(folder: Path) -> list[Path]:
    """Return the checkpoints that were put aside because they did not verify."""
    return sorted(folder.glob(".bad-step-*"))


def remove_staging(folder: Path) -> None:
    """Remove what saves that were killed have left; nobody else may be saving into this folder."""
    for path in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path, word: str) -> Path:
    """Rename the folder to `.word-NAME` and return the new path; nothing is deleted or overwritten."""
    aside = path.with_name(f".{word}-{path.name}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f".{word}-{path.name}-{count}")
    path.rename(aside)
    files.sync(path.parent)
    return aside
