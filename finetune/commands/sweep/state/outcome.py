"""How a run of a sweep stands, from its status file and the end of its last process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.sweep.state.record import RecordedRun
from finetune.runtime.files.read import read_json
from finetune.runtime.supervision import status as status_file

WAITING, RUNNING, FINISHED, STOPPED = "waiting", "running", "finished", "stopped"
INTERRUPTED, FAILED, PRUNED = "interrupted", "failed", "pruned"

OVER = (FINISHED, PRUNED)
"""Such a run is not started again."""

_NOT_ITS_FAULT = ("LostContact", "DiskError")
"""Errors after which a run's own message says that the same command continues it."""


@dataclass(frozen=True)
class Outcome:
    """The state of a run that no process works on, and in a few words why."""

    state: str
    message: str = ""
    step: int = 0
    num_steps: int | None = None


def read_status(folder: Path) -> Mapping[str, Any]:
    """Return the status file of a run; empty where there is none that can be read."""
    try:
        found = read_json(folder / status_file.STATUS_FILE)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def outcome_of(status: Mapping[str, Any], record: RecordedRun) -> Outcome:
    """Return how the run stands; a process that ended without a word counts as interrupted, and resumes."""
    step, num_steps = _count(status.get("step")) or 0, _count(status.get("num_steps"))
    state, message = _state(status, record)
    return Outcome(state, message, step, num_steps)


def _state(status: Mapping[str, Any], record: RecordedRun) -> tuple[str, str]:
    state = status.get("state")
    if record.is_pruned and state != status_file.FINISHED:  # it may have ended before it saw that it is to stop
        return PRUNED, ""
    if _is_older(status, record.started) and record.exit_code is not None and record.exit_code > 0:
        return FAILED, record.message or f"exit code {record.exit_code}"  # before it wrote any status
    if state == status_file.FINISHED:
        return FINISHED, ""
    if state == status_file.STOPPED:
        return STOPPED, str(status.get("reason") or "")
    if state == status_file.FAILED:
        error = status.get("error")
        kind, text = (error.get("type"), error.get("message")) if isinstance(error, dict) else (None, None)
        return (INTERRUPTED if kind in _NOT_ITS_FAULT else FAILED), str(text or record.message or "")
    if state is None and record.exit_code is None:
        return WAITING, ""
    return INTERRUPTED, _format_exit(record.exit_code)


def _is_older(status: Mapping[str, Any], started: float | None) -> bool:
    time = status.get("time")
    return started is None or not isinstance(time, int | float) or time < started


def _format_exit(code: int | None) -> str:
    if code is None:
        return "its process was killed with the sweep"
    return f"killed by signal {-code}" if code < 0 else f"ended without a word, exit code {code}"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
