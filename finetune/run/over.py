"""What a run's folder says of a run that is over: read as JSON alone, before anything that trains is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from finetune.checkpoint import layout
from finetune.checkpoint.changes import told_changes
from finetune.checkpoint.facts import RunFacts
from finetune.checkpoint.manifest import Manifest, OtherFormatError, first_problem, read_named
from finetune.checkpoint.texts import read_texts
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.errors import CheckpointError
from finetune.runtime.json_files import parse_as, read_regular
from finetune.runtime.progress import Progress
from finetune.runtime.redact import redacted_config
from finetune.train.early_stopping import EARLY, FINISHED, EarlyStopping

FOLDER = "final"
RECORD = "final.json"
"""Which step `final/` is from, why the run was over then, what `export:` said, the sizes of its files, its inputs."""


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Record(TypedDict):
    step: int
    reason: str
    export: dict[str, Any]
    files: dict[str, int]
    inputs: NotRequired[dict[str, list[int]] | None]
    pushed_to: NotRequired[str | None]
    push_problem: NotRequired[str | None]


_RECORD: TypeAdapter[Any] = TypeAdapter(_Record)

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
        if path is None or not is_whole(path, manifest := read_named(path)):
            return None
        progress = Progress.from_state_dict(read_texts(path, manifest).progress)
    except OtherFormatError:  # said before a model is built
        raise
    except (CheckpointError, OSError):  # whatever it is, `continue_run` meets it too, and sets aside or refuses
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
    record = read_record(run_folder)
    if record is None or record["step"] != step or record["export"] != redacted_config(section.model_dump()):
        return False
    try:
        sizes = {name: (run_folder / FOLDER / name).stat().st_size for name in record["files"]}
        return bool(sizes == record["files"])
    except OSError:
        return False


def read_record(run_folder: Path) -> dict[str, Any] | None:
    """Return the record beside `final/`; None where there is none, or none that can be believed: it is made again."""
    try:
        return dict(parse_as(_RECORD, read_regular(run_folder / RECORD)))
    except (OSError, ValueError):
        return None


def is_whole(path: Path, manifest: Manifest) -> bool:
    """Tell whether all files are there with their sizes; those that are no tensors also with their digests."""
    if any((path / name).stat().st_size != facts.size_bytes for name, facts in manifest.files.items()):
        return False
    return first_problem(path, manifest.files, manifest.files.keys() & layout.TEXTS) is None


def _over_because(config: RunConfig, progress: Progress, *, num_steps: int) -> str | None:
    section = config.train.early_stopping
    if section is not None and EarlyStopping(section).is_over(progress):
        return EARLY
    return FINISHED if progress.step >= num_steps else None
