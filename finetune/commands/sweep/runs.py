"""The runs of a sweep: every combination of the values, each checked as `finetune check` does before any starts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.commands.sweep.axes import Axis, Values, run_name
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.overrides import override_text
from finetune.config.resume_keys import COMPARED_BY_CONTENT, keys_that_may_differ, keys_that_must_match
from finetune.config.run_config import RunConfig
from finetune.config.section import parent_keys, with_location
from finetune.config.yaml import MAX_LISTED
from finetune.errors import ConfigError, Problem
from finetune.runtime.supervision import status as status_file

RUNS_FOLDER, LOGS_FOLDER = "runs", "logs"


@dataclass(frozen=True)
class SweepRun:
    """One run of the sweep: its values, and the overrides for `finetune train`."""

    name: str
    values: Values
    overrides: tuple[str, ...]
    sweep_folder: Path

    @property
    def folder(self) -> Path:
        """Return its run folder."""
        return self.sweep_folder / RUNS_FOLDER / self.name

    @property
    def log(self) -> Path:
        """Return the file with its output."""
        return self.sweep_folder / LOGS_FOLDER / f"{self.name}.log"


def make_run(values: Values, axes: Sequence[Axis], *, folder: Path, name: str | None = None) -> SweepRun:
    """Return the run with these values of swept keys and the only value of every other key, in the written order."""
    overrides = tuple(override_text(axis.key, values.get(axis.key, axis.values[0])) for axis in axes)
    return SweepRun(name or run_name(values), values, overrides, folder)


def own_overrides(run: SweepRun, loaded: LoadedConfig) -> list[str]:
    """Return the overrides that the sweep adds to every run: its folder, and to resume from its own checkpoints.

    A job that starts from another checkpoint (`checkpoint.resume`) does so until the run has its own.
    """
    texts = [override_text("run.folder", str(run.folder.absolute()))]
    if loaded.config.run.local_folder is not None:
        texts.append("run.local_folder=null")
    starts_elsewhere = loaded.config.checkpoint.resume not in ("auto", "never")
    if not starts_elsewhere or any((run.folder / "checkpoints").glob("step-*")):
        texts.append("checkpoint.resume=auto")
    return texts


def check_runs(job: Path, runs: Sequence[SweepRun], *, num_processes: int) -> LoadedConfig:
    """Return the config of the first run; raises ConfigError with the problems of all runs."""
    runs_by_problem: dict[Problem, str] = {}
    configs = []
    for run in runs:
        try:
            configs.append(load_run(job, run, num_processes=num_processes))
        except ConfigError as error:
            for problem in error.problems:
                runs_by_problem.setdefault(problem, run.name)
    problems = [
        replace(problem, message=f"{problem.message} (run {name})") for problem, name in runs_by_problem.items()
    ]
    if problems:
        raise ConfigError(problems[:MAX_LISTED], job.name, num_more=max(0, len(problems) - MAX_LISTED))
    return configs[0]


def load_run(job: Path, run: SweepRun, *, num_processes: int) -> LoadedConfig:
    """Return the config of the run, checked also for the number of processes; raises ConfigError."""
    loaded = load_config(job, run.overrides)
    require_divisible_batch(loaded, num_processes=num_processes)
    if loaded.config.run.on_end is not None:
        message = (
            "it would run after each run of the sweep. Leave it out (`--set run.on_end=null`), and put the command "
            "after the sweep: `finetune sweep ...; COMMAND`."
        )
        raise ConfigError([with_location(Problem("run.on_end", message), loaded.sources)], job.name)
    return loaded


def job_facts(config: RunConfig, *, swept: Collection[str]) -> dict[str, str]:
    """Return the keys that all runs of a job share and that must not change, with their values as JSON.

    These are the keys that a resume must match and the keys that locate the data, without swept keys.
    """
    content = {key: text for key, text in keys_that_may_differ(config).items() if key in COMPARED_BY_CONTENT}
    facts = {**keys_that_must_match(config), **content}
    return {key: text for key, text in facts.items() if not {key, *parent_keys(key)} & set(swept)}


WAITING = "waiting"
FINISHED = "finished"
STOPPED = "stopped"
INTERRUPTED = "interrupted"
FAILED = "failed"

_RESUMABLE_ERRORS = ("LostContact", "DiskError")
"""Errors of the machine, after which the run resumes from its checkpoint."""


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run in the journal; everything else is in its own files."""

    name: str
    values: Values = field(default_factory=dict)
    error: str | None = None  # of a process that failed before it wrote any status


@dataclass(frozen=True)
class RunOutcome:
    """The state of a run without a process, and the reason."""

    state: str
    message: str = ""
    step: int = 0
    num_steps: int | None = None


def outcome_of(status: Mapping[str, Any], record: RecordedRun) -> RunOutcome:
    """Return the run's outcome; a process that exited unexpectedly counts as interrupted, and resumes."""
    written, error = status.get("state"), status.get("error")
    error = error if isinstance(error, dict) else {}
    if record.error is not None:
        state, message = FAILED, record.error
    elif written == status_file.FINISHED:
        state, message = FINISHED, ""
    elif written == status_file.STOPPED:
        state, message = STOPPED, str(status.get("reason") or "")
    elif written == status_file.FAILED:
        state = INTERRUPTED if error.get("type") in _RESUMABLE_ERRORS else FAILED
        message = str(error.get("message") or "")
    elif written is None:
        state, message = WAITING, ""
    else:
        state, message = INTERRUPTED, "its process was killed"
    step, num_steps = (
        count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
        for count in (status.get("step"), status.get("num_steps"))
    )
    return RunOutcome(state, message, step or 0, num_steps)
