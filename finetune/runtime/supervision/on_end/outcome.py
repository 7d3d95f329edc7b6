"""Pure decisions: how a run has ended on this machine, and whether its command is due."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OUTCOMES = ("finished", "failed", "failed_start", "stopped", "interrupted", "idle")
KILLED = "killed"
WAIT, LEAVE = "wait", "leave"

_MAX_REASON_LENGTH = 100

Process = Sequence[float]
"""The pid and creation time (unix seconds) of a process, since pids are reused."""


@dataclass(frozen=True)
class EndHook:
    """The command and the run that it belongs to, as plain values that are sent as JSON. Durations in seconds."""

    command: str
    when: Sequence[str]
    restart_seconds: float
    idle_after_seconds: float
    timeout_seconds: float
    run_folder: str
    log: str  # file for the command's output
    host: str
    launch: str  # as in status.json
    url: str = ""  # to which the run is uploaded
    processes: Sequence[Process] = ()  # ranks of this host
    launchers: Sequence[Process] = ()  # that may start the run again
    has_trained: bool = False  # in this start, or one that it replaces


@dataclass(frozen=True)
class RunEnd:
    """The end of the run on this machine."""

    outcome: str
    reason: str
    exit_code: int
    step: int = 0


def next_action(
    end: RunEnd, hook: EndHook, *, is_alive: bool, quiet_seconds: float, ended_seconds: float = 0.0
) -> str | RunEnd:
    """Return WAIT, LEAVE if there is nothing left to do, or the end for which the command is due now.

    `is_alive`: a process of the run, or a launcher that may start it again, exists on this machine. `quiet_seconds` is
    the time since the last sign of progress, `ended_seconds` the time since no process has been alive.
    """
    if is_alive:
        is_idle = "idle" in hook.when and quiet_seconds > hook.idle_after_seconds
        return RunEnd("idle", "no progress", 1, end.step) if is_idle else WAIT
    if end.outcome not in hook.when:
        return LEAVE
    return end if end.outcome == "finished" or ended_seconds >= hook.restart_seconds else WAIT


def end_of_run(announced: Mapping[str, Any] | None, status: Mapping[str, Any], *, hook: EndHook) -> RunEnd:
    """Return the end of the run that its process announced last, else that of status.json.

    The status of another launch is ignored. A status without an end belongs to a killed run.
    """
    facts = status if status.get("launch") == hook.launch else {}
    step = _whole(facts.get("step"), 0)
    failed = "failed" if hook.has_trained else "failed_start"
    source = announced or facts
    state, code, reason = source.get("state"), _whole(source.get("exit_code"), 1), _plain_words(source.get("reason"))
    if state == "finished" and announced is not None:
        if code == 0:
            return RunEnd("finished", reason, 0, step)
        return RunEnd("failed", "not everything was uploaded", code, step)
    if state == "stopped" and code != 1:
        is_by_user = reason in ("signal SIGINT", "interrupted")
        return RunEnd("interrupted" if is_by_user else "stopped", reason, code, step)
    if state in ("stopped", "failed"):
        error = facts.get("error")
        error_type = _plain_words(error.get("type")) if isinstance(error, Mapping) else ""
        return RunEnd(failed, error_type or reason or "error", code or 1, step)
    return RunEnd(failed, KILLED, 1, step)


def describe_end(end: RunEnd, hook: EndHook) -> dict[str, str]:
    """Return the environment variables that describe the end to the command."""
    return {
        "FINETUNE_OUTCOME": end.outcome,
        "FINETUNE_REASON": end.reason,
        "FINETUNE_EXIT_CODE": str(end.exit_code),
        "FINETUNE_STEP": str(end.step),
        "FINETUNE_RUN_FOLDER": hook.run_folder,
        "FINETUNE_RUN_URL": hook.url,
        "FINETUNE_STATUS_FILE": f"{hook.run_folder}/status.json",
    }


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _plain_words(value: Any) -> str:
    """Return a reason without special characters, since it may be the name of any exception.

    >>> _plain_words("signal SIGTERM"), _plain_words("$(reboot)")
    ('signal SIGTERM', 'reboot')
    """
    return re.sub(r"[^\w .-]", "", str(value))[:_MAX_REASON_LENGTH].strip() if isinstance(value, str) else ""
