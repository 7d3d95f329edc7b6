"""The launches of a rehearsal: one that is killed and one that resumes, and the phase and error of a failure."""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.inventory import find_problems, read_entry
from finetune.commands.rehearse.job_changes import RehearsalSteps
from finetune.commands.rehearse.report import Rehearsal
from finetune.commands.verify.runs import read_completed_run, run_differences
from finetune.config.sections.data import DataSection
from finetune.errors import CheckpointError, FinetuneError, UserError
from finetune.launch.child import child_process, train_command
from finetune.report.history import read_events
from finetune.run.setup.training_data import TrainingData
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.status import read_status

_POLL_SECONDS = 0.1
_MAX_ERROR_LINES = 25
_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: ")
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

    @property
    def command(self) -> list[str]:
        """Return the command, with a free port."""
        return train_command(
            self.config,
            overrides=self.overrides,
            accelerate_config=self.accelerate,
            num_processes=self.processes,
            port=free_loopback_port(),
        )


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Turn an error into the failure of this phase."""
    try:
        yield
    except PhaseError:
        raise
    except FinetuneError as error:
        raise PhaseError(name, str(error), exit_code=error.exit_code) from error


def launch_and_resume(launch: Launch, schedule: RehearsalSteps, *, merges: bool, report: Rehearsal) -> None:
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
    report.passed("strategy", str(started["strategy"]), *map(str, started["arithmetic"][:_MAX_LINES]))
    report.passed("steps", *_steps_evidence(events))

    (uninterrupted / CHECKPOINTS_FOLDER).mkdir(parents=True)
    shutil.copyfile(run / "events.jsonl", uninterrupted / "events.jsonl")
    saved = layout.steps(run / CHECKPOINTS_FOLDER)
    for number, path in saved.items():
        if number > step:
            shutil.move(path, uninterrupted / CHECKPOINTS_FOLDER / path.name)
    shutil.rmtree(run / FINAL_FOLDER, ignore_errors=True)
    with phase("checkpoint"):
        problems, bad = find_problems(read_entry(saved[step]), read_all=True)
        if problems or bad:
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
    verified = [note for note in notes if "verified" in note]
    exported = "merged model" if merges else "adapter" if "adapter_config.json" in names else "model"
    evidence = f"{exported} of {len(names)} files{f': {verified[-1]}' if verified else ''}"
    report.passed("export", evidence, f"final/: {', '.join(names)}")


def _run(launch: Launch, log: Path, *, until: tuple[str, int] | None = None) -> int | None:
    """Run the job to its end, or until it logs this event at this step; return its exit code, None if it was killed."""
    with child_process(launch.command, log=log, environment=ENVIRONMENT) as process:
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
    names = {name for name, _ in _reached(run)}
    if "RunStarted" not in names:
        return "strategy"
    error = read_status(run).get("error") or {}
    is_saving = "StepTaken" in names and not error and "CheckpointSaved" not in names
    return "checkpoint" if is_saving or error.get("type") in ("CheckpointError", "DiskError") else "steps"


def _failure(launch: Launch, log: Path, *, phase: str) -> PhaseError:
    """Return the error that the run reported, with its exit code."""
    text = log.read_text(encoding="utf-8", errors="replace")
    status = read_status(launch.run)
    own = status.get("exit_code")
    message = error_in(text) or (status.get("error") or {}).get("message")
    if not message:
        message = "\n".join([line for line in text.splitlines() if line.strip()][-8:])
    is_user_error = own == UserError.exit_code or (own is None and error_in(text) is not None)
    return PhaseError(phase, message, exit_code=UserError.exit_code if is_user_error else 1, log=log)


def error_in(log: str) -> str | None:
    r"""Return the first error that a run printed; None if it printed a traceback or nothing.

    >>> error_in("ok\nerror: 2 problems\n  one\n  two\nW1123 launcher ...")
    '2 problems\n  one\n  two'
    """
    lines = log.splitlines()
    indices = [index for index, line in enumerate(lines) if _ERROR.match(line)]
    if not indices:
        return None
    first = _ERROR.sub("", lines[indices[0]])
    rest = []
    for line in lines[indices[0] + 1 :]:
        if not line.startswith("  "):
            break
        rest.append(line)
    return "\n".join([first, *rest[:_MAX_ERROR_LINES]])


_MAX_LINES = 4


def template_evidence(section: DataSection, data: TrainingData) -> Iterator[str]:
    """Yield the numbers of samples, tokens and targets of the rows."""
    for key, source in data.sources.items():
        counts = source.counts
        if not counts.rows:
            yield f"{key}: a stream, prepared while the model trains"
            continue
        yield (
            f"{key}: {counts.rows:,} rows gave {counts.samples:,} samples of {counts.tokens:,} tokens, "
            f"{counts.targets:,} of them targets"
        )
    if section.batching.by == "packs" and data.training.order.num_positions:
        yield f"{data.training.order.num_positions:,} packs"


def _steps_evidence(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the losses, the metrics and the number of generated answers."""
    taken = {event["step"]: event for event in events if event["event"] == "StepTaken"}
    losses = ", ".join(f"{event['loss']:.4f}" for event in taken.values())
    yield f"{len(taken)} steps, losses {losses}"
    evaluated = [event for event in events if event["event"] == "Evaluated"]
    if evaluated:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in islice(evaluated[-1]["metrics"].items(), 4))
        yield f"{len(evaluated)} evaluations, the last of {evaluated[-1]['num_rows']:,} rows: {metrics}"
    answers = sum(event["event"] == "Answered" for event in events)
    if answers:
        yield f"{answers} answers generated"
