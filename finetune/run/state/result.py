"""The result of a training for a caller in Python, from the run or read from its folder. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest_of_step
from finetune.checkpoint.format.metadata import read_metadata
from finetune.errors import CheckpointError, FinetuneError, TrainingError, error_of_type
from finetune.runtime.files.read import read_json
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import STATUS_FILE
from finetune.train.early_stopping import FINAL_REASONS


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and where it left its checkpoint and its model."""

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


def read_result(folder: Path) -> RunResult:
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
