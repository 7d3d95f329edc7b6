"""Whether a run is finished, and the result of one for a caller in Python, read as JSON alone, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    Manifest,
    OtherFormatError,
    first_file_problem,
    read_manifest_of_step,
    read_metadata,
)
from finetune.config.run_config import RunConfig
from finetune.config.sections.export import ExportSection
from finetune.errors import CheckpointError, FinetuneError, TrainingError, error_of_type
from finetune.runtime.files.read import parse_as, read_json, read_regular
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import STATUS_FILE
from finetune.runtime.text.redact import redact_known_values
from finetune.train.stopping import EARLY_STOPPING, FINAL_REASONS, FINISHED, EarlyStopping

FINAL_RECORD = "final.json"
"""Which step `final/` is from, why the run ended, its `export:` section and the sizes of its files."""


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Record(TypedDict):
    step: int
    reason: str
    export: dict[str, Any]
    files: dict[str, int]
    inputs: NotRequired[Any]  # of earlier versions
    last_step: NotRequired[int]  # of the run, where `step` is its best
    pushed_to: NotRequired[str | None]
    push_problem: NotRequired[str | None]


_RECORD: TypeAdapter[Any] = TypeAdapter(_Record)


@dataclass(frozen=True)
class FinishedRun:
    """A run that needs nothing more."""

    checkpoint: Path
    progress: Progress
    reason: str


def read_finished_run(config: RunConfig, *, num_steps: int) -> tuple[FinishedRun, Manifest] | None:
    """Return the run if its last checkpoint is whole by size, the last of the run, and `final/` is from it."""
    if config.checkpoint.resume != "auto":
        return None
    folder = Path(config.run.folder)
    path = layout.newest_checkpoint(folder / CHECKPOINTS_FOLDER)
    try:
        if path is None or not is_complete(path, manifest := read_manifest_of_step(path)):
            return None
        progress = Progress.from_state_dict(read_metadata(path, manifest).progress)
    except OtherFormatError:  # reported before a model is built
        raise
    except (CheckpointError, OSError):  # `restore` meets the same error, and sets the checkpoint aside or refuses it
        return None
    reason = FINISHED if progress.step >= num_steps else None
    if EarlyStopping(config.train.early_stopping).is_over(progress):
        reason = EARLY_STOPPING
    if reason is None or not is_exported(folder, step=progress.step, section=config.export):
        return None
    return FinishedRun(path, progress, reason), manifest


def is_exported(run_folder: Path, *, step: int, section: ExportSection) -> bool:
    """Return whether `final/` was exported so when the run was at this step, and each file still has its size.

    A final model that was not verified does not count if verification is on; older versions did not record it.
    """
    record, requested = read_final_record(run_folder), dict(redact_known_values(section.model_dump()))
    if record is None or record.get("last_step", record["step"]) != step:
        return False
    exported = {
        "checkpoint": "last",
        **record["export"],
        "verify": record["export"].get("verify", True) or not section.verify,
    }
    if exported != {**requested, "verify": True}:
        return False
    try:
        sizes = {name: (run_folder / FINAL_FOLDER / name).stat().st_size for name in record["files"]}
        return bool(sizes == record["files"])
    except OSError:
        return False


def read_final_record(run_folder: Path) -> dict[str, Any] | None:
    """Return the record next to `final/`; None if it does not exist or is damaged: the model is exported again."""
    try:
        return dict(parse_as(_RECORD, read_regular(run_folder / FINAL_RECORD)))
    except (OSError, ValueError):
        return None


def is_complete(path: Path, manifest: Manifest) -> bool:
    """Return whether all files exist with their sizes, and files without tensors also with their digests."""
    if any((path / name).stat().st_size != facts.size_bytes for name, facts in manifest.files.items()):
        return False
    return first_file_problem(path, manifest.files, manifest.files.keys() & layout.METADATA_FILES) is None


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and the paths of its checkpoint and its model."""

    folder: Path
    reason: str  # `finished`, `early stopping`, `time limit`, `STOP file`, `signal SIGTERM`, ...
    num_steps: int  # taken so far, over all starts
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    checkpoint: Path | None = None  # the newest
    final: Path | None = None  # the exported model of a run that is over

    @property
    def is_finished(self) -> bool:
        """Return whether the run is over; otherwise the same call resumes it."""
        return self.reason in FINAL_REASONS


def result_of_run(folder: Path, *, reason: str, progress: Progress) -> RunResult:
    """Return the result of the run in the folder that has come so far."""
    final = folder / FINAL_FOLDER
    return RunResult(
        folder,
        reason,
        progress.step,
        metrics=dict(progress.last_metrics),
        checkpoint=layout.newest_checkpoint(folder / CHECKPOINTS_FOLDER),
        final=final if reason in FINAL_REASONS and final.is_dir() else None,
    )


def read_run_result(folder: Path) -> RunResult:
    """Return the result of the run in the folder, which ended in another process; raises TrainingError for none."""
    try:
        status = read_json(folder / STATUS_FILE)
        reason, step = str(status["reason"]), int(status["step"])
        checkpoint = layout.newest_checkpoint(folder / CHECKPOINTS_FOLDER)
        progress = Progress(step=step)
        if checkpoint is not None:
            progress = Progress.from_state_dict(read_metadata(checkpoint, read_manifest_of_step(checkpoint)).progress)
        progress.step = step
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise TrainingError(f"{folder}: the end of the run cannot be read: {error}") from error
    return result_of_run(folder, reason=reason, progress=progress)


def read_error(folder: Path, *, since: float) -> FinetuneError | None:
    """Return the error that ended a run of other processes after this time (unix seconds); None where none is known."""
    try:
        status = read_json(folder / STATUS_FILE)
        error = status["error"]
        if error is None or status["time"] < since:
            return None
        return error_of_type(str(error["type"]), str(error["message"]), exit_code=int(status["exit_code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
