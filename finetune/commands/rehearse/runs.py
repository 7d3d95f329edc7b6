"""The launches of a rehearsal: one that is killed and one that resumes, and the phase and error of a failure."""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.inventory import find_problems, read_entry
from finetune.commands.rehearse.job_changes import RehearsalSteps
from finetune.commands.rehearse.report import Rehearsal
from finetune.commands.verify.runs import read_completed_run, run_differences
from finetune.errors import CheckpointError, FinetuneError, UserError
from finetune.launch.child import child_process, train_command
from finetune.report.history import read_events
from finetune.run.setup.training_data import TrainingData
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import read_status

_POLL_SECONDS = 0.1
_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: (.*(?:\n  .*)*)", re.MULTILINE)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


class PhaseError(FinetuneError):
    """A phase of the rehearsal failed, with the error of the run and its log."""

    def __init__(self, phase: str, message: str, *, exit_code: int, log: Path | None = None) -> None:
        super().__init__(message)
        self.phase = phase
        self.exit_code = exit_code
        self.log = log


@dataclass(frozen=True)
class Launch:
    """The accelerate file, the processes, the job file and its overrides."""

    accelerate: Path
    processes: int
    config: Path
    overrides: tuple[str, ...]
    run: Path  # the folder of the run
    deadline: float  # of the whole rehearsal, by time.monotonic()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Turn an error into the failure of this phase."""
    try:
        yield
    except PhaseError:
        raise
    except FinetuneError as error:
        raise PhaseError(name, str(error), exit_code=error.exit_code) from error


def launch_and_resume(launch: Launch, schedule: RehearsalSteps, *, report: Rehearsal) -> None:
    """Run the job until its last step is saved, kill it, resume it from the step before, and compare both.

    The later checkpoints of the first launch are set aside, as if it had been killed after the step before. Raises
    PhaseError.
    """
    run, step, last = launch.run, schedule.saved_at, schedule.steps
    log, uninterrupted = run.with_name("first.log"), run.with_name("uninterrupted")
    _run(launch, log, until=("CheckpointSaved", last))
    events = _events(run)
    if ("CheckpointSaved", last) not in _reached(run):
        raise _failure(launch, log, phase=_phase_of(run))
    started = next(event for event in events if event["event"] == "RunStarted")
    report.passed("strategy", str(started["strategy"]))
    losses = {event["step"]: f"{event['loss']:.4f}" for event in events if event["event"] == "StepTaken"}
    num_evaluations = sum(event["event"] == "Evaluated" for event in events)
    report.passed("steps", f"{len(losses)} steps, losses {', '.join(losses.values())}; {num_evaluations} evaluations")

    (uninterrupted / CHECKPOINTS_FOLDER).mkdir(parents=True)
    shutil.copyfile(run / "events.jsonl", uninterrupted / "events.jsonl")
    saved = layout.steps(run / CHECKPOINTS_FOLDER)
    for number, path in saved.items():
        if number > step:
            shutil.move(path, uninterrupted / CHECKPOINTS_FOLDER / path.name)
    shutil.rmtree(run / FINAL_FOLDER, ignore_errors=True)
    with phase("checkpoint"):
        if problems := find_problems(read_entry(saved[step]), read_all=True):
            raise CheckpointError(f"{saved[step]}: {'; '.join(problems)}")
        files = [file for file in saved[step].rglob("*") if file.is_file()]
        size = format_size(sum(file.stat().st_size for file in files))
        report.passed("checkpoint", f"step {step}: {len(files)} files, {size}, every digest matches its manifest")

    log, known = run.with_name("resumed.log"), len(events)
    code = _run(launch, log)
    reached = _reached(run)[known:]
    has_ended = code == 0 and ("RunEnded", last) in reached
    if not has_ended and not {("StepTaken", last), ("CheckpointSaved", last)} <= set(reached):
        raise _failure(launch, log, phase="resume")
    if ("RunStarted", step) not in reached:
        raise PhaseError("resume", f"the run did not resume from step {step}.", exit_code=1, log=log)
    expected, resumed = read_completed_run(uninterrupted), read_completed_run(run)
    if differences := list(run_differences(expected, resumed, stop_at=step, tolerance=None)):
        raise PhaseError("resume", f"the resumed run differs: {'; '.join(differences)}.", exit_code=1, log=log)
    report.passed(
        "resume",
        f"killed, resumed from step {step}: samples, losses and the last checkpoint are bitwise equal to those of the "
        "uninterrupted run",
    )
    if not has_ended:
        raise _failure(launch, log, phase="export")
    names = sorted(path.name for path in (run / FINAL_FOLDER).iterdir())
    notes = [str(event["message"]) for event in _events(run) if event["event"] == "Noted"]
    report.passed("export", *(note for note in notes if "verified" in note), f"final/: {', '.join(names)}")


def _run(launch: Launch, log: Path, *, until: tuple[str, int] | None = None) -> int | None:
    """Run the job to its end, or until it logs this event at this step; return its exit code, None if it was killed."""
    command = train_command(
        launch.config,
        overrides=launch.overrides,
        accelerate_config=launch.accelerate,
        num_processes=launch.processes,
        port=free_loopback_port(),
    )
    with child_process(command, log=log, environment=ENVIRONMENT) as process:
        while process.poll() is None and (until is None or until not in _reached(launch.run)):
            if time.monotonic() > launch.deadline:
                raise PhaseError(
                    _phase_of(launch.run),
                    "the time limit of the rehearsal was reached. Raise --time-limit, or shorten data.max_length with "
                    "--set.",
                    exit_code=1,
                    log=log,
                )
            time.sleep(_POLL_SECONDS)
        return process.poll()


def _events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return read_events(path) if path.exists() else []


def _reached(run: Path) -> list[tuple[str, int | None]]:
    """Return the name and the step of each event of the run."""
    return [(event["event"], event.get("step")) for event in _events(run)]


def _phase_of(run: Path) -> str:
    """Return the phase that the first launch reached, by its events."""
    if "RunStarted" not in {name for name, _ in _reached(run)}:
        return "strategy"
    error = read_status(run).get("error") or {}
    return "checkpoint" if error.get("type") in ("CheckpointError", "DiskError") else "steps"


def _failure(launch: Launch, log: Path, *, phase: str) -> PhaseError:
    """Return the error that the run reported, with its exit code."""
    text, status = log.read_text(encoding="utf-8", errors="replace"), read_status(launch.run)
    printed, exit_code = error_in(text), status.get("exit_code")
    message = printed or (status.get("error") or {}).get("message") or "\n".join(text.split("\n")[-8:])
    is_user_error = exit_code == UserError.exit_code or (exit_code is None and printed is not None)
    return PhaseError(phase, message, exit_code=UserError.exit_code if is_user_error else 1, log=log)


def error_in(log: str) -> str | None:
    r"""Return the first error that a run printed; None if it printed a traceback or nothing.

    >>> error_in("ok\nerror: 2 problems\n  one\n  two\nW1123 launcher ...")
    '2 problems\n  one\n  two'
    """
    printed = _ERROR.search(log)
    return None if printed is None else printed[1]


def template_evidence(data: TrainingData) -> Iterator[str]:
    """Yield the numbers of samples, tokens and targets of the rows."""
    for key, counts in ((key, source.counts) for key, source in data.sources.items()):
        if counts.rows:
            samples = f"{counts.samples:,} samples of {counts.tokens:,} tokens, {counts.targets:,} of them targets"
            yield f"{key}: {counts.rows:,} rows gave {samples}"
        else:
            yield f"{key}: a stream, prepared while the model trains"
