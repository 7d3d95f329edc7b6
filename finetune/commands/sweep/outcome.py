"""The state of a run, from its own status file and the exit of its last process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, with_config

from finetune.commands.sweep.runs import Values
from finetune.runtime.files.read import read_json
from finetune.runtime.supervision import status as status_file

WAITING, RUNNING, FINISHED, STOPPED = "waiting", "running", "finished", "stopped"
INTERRUPTED, FAILED, PRUNED = "interrupted", "failed", "pruned"

OVER = (FINISHED, PRUNED)
"""Such a run is not started again."""

_RESUMABLE_ERRORS = ("LostContact", "DiskError")
"""Errors of the machine: the run resumes from its checkpoint."""


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True)
class RecordedRun:
    """What a run's own folder does not hold: its values, the exit of its last process, and whether it was pruned."""

    name: str
    values: Values = field(default_factory=dict)
    started: float | None = None  # unix seconds
    exit_code: int | None = None
    message: str | None = None  # the end of the log of a process that failed
    is_pruned: bool = False


@dataclass(frozen=True)
class Outcome:
    """The state of a run without a process, and the reason in a few words."""

    state: str
    message: str = ""
    step: int = 0
    num_steps: int | None = None


def read_status(folder: Path) -> Mapping[str, Any]:
    """Return the status file of a run; empty where none can be read."""
    try:
        status = read_json(folder / status_file.STATUS_FILE)
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def outcome_of(status: Mapping[str, Any], record: RecordedRun) -> Outcome:
    """Return the run's outcome; a process that exited unexpectedly counts as interrupted, and resumes."""
    state, message = _state(status, record)
    return Outcome(state, message, _count(status.get("step")) or 0, _count(status.get("num_steps")))


def _state(status: Mapping[str, Any], record: RecordedRun) -> tuple[str, str]:
    state, code, written = status.get("state"), record.exit_code, status.get("time")
    if record.is_pruned and state != status_file.FINISHED:  # it may have ended before it saw the STOP file
        return PRUNED, ""
    is_older = record.started is None or not isinstance(written, int | float) or written < record.started
    if is_older and code is not None and code > 0:
        return FAILED, record.message or f"exit code {code}"  # before it wrote any status
    if state == status_file.FINISHED:
        return FINISHED, ""
    if state == status_file.STOPPED:
        return STOPPED, str(status.get("reason") or "")
    if state == status_file.FAILED:
        error = status.get("error")
        error = error if isinstance(error, dict) else {}
        message = str(error.get("message") or record.message or "")
        return (INTERRUPTED if error.get("type") in _RESUMABLE_ERRORS else FAILED), message
    if code is None:
        return (WAITING, "") if state is None else (INTERRUPTED, "its process was killed with the sweep")
    return INTERRUPTED, f"killed by signal {-code}" if code < 0 else f"exited unexpectedly with exit code {code}"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
