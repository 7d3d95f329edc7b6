"""How a run has ended on this machine, and whether its command is due: pure decisions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("finished", "failed", "failed_start", "stopped", "interrupted", "idle")
KILLED = "killed"
NOT_UPLOADED = "not everything was uploaded"

_BY_A_PERSON = ("signal SIGINT", "interrupted")
_LONGEST_REASON = 100

Process = tuple[int, float]
"""A process by its number and when it was created (unix seconds): numbers are given again."""


@dataclass(frozen=True)
class EndHook:
    """What is to be done, of which run; durations in seconds."""

    command: str
    shown: str  # the command as it may be printed
    when: tuple[str, ...]
    restart_seconds: float
    idle_after_seconds: float
    timeout_seconds: float
    run_folder: str
    log: str  # file that gets the command's output
    host: str
    launch: str  # as in status.json
    url: str = ""  # where the run is uploaded to
    processes: tuple[Process, ...] = ()  # ranks of this host
    launchers: tuple[Process, ...] = ()  # that may start the run again
    has_trained: bool = False  # this start, or one that it replaces

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "EndHook":
        """Return the order of JSON values."""
        pairs = {name: tuple((int(pid), float(at)) for pid, at in values[name]) for name in ("processes", "launchers")}
        return cls(**{**values, "when": tuple(values["when"]), **pairs})


@dataclass(frozen=True)
class RunEnd:
    """How the run has ended here."""

    outcome: str
    reason: str
    exit_code: int
    step: int = 0


@dataclass(frozen=True)
class Observation:
    """What the sentinel sees at a moment."""

    is_alive: bool  # a process of the run on this machine, or a launcher that may start it again
    quiet_seconds: float  # since the last sign of progress
    ended_seconds: float = 0.0  # since nothing is alive any more
    is_replaced: bool = False  # the run was started again, and has another sentinel
    end: RunEnd = field(default_factory=lambda: RunEnd("failed", KILLED, 1))


WAIT, LEAVE = "wait", "leave"


def next_action(seen: Observation, order: EndHook) -> str | RunEnd:
    """Return WAIT, LEAVE where nothing is to be done any more, or the end for which the command is due now."""
    if seen.is_replaced:
        return LEAVE
    if seen.is_alive:
        is_idle = "idle" in order.when and seen.quiet_seconds > order.idle_after_seconds
        return RunEnd("idle", "no progress", 1, seen.end.step) if is_idle else WAIT
    if seen.end.outcome not in order.when:
        return LEAVE
    wait = 0.0 if seen.end.outcome == "finished" else order.restart_seconds
    return seen.end if seen.ended_seconds >= wait else WAIT


def end_of_run(announced: Mapping[str, Any] | None, status: Mapping[str, Any], *, order: EndHook) -> RunEnd:
    """Return how the run has ended: as its process has announced at its very end, else as status.json says.

    A status of another launch says nothing of this machine. One that shows no end was left by a killed run.
    """
    facts = status if status.get("launch") == order.launch else {}
    step = _whole(facts.get("step"), 0)
    failed = "failed" if order.has_trained else "failed_start"
    state, code = (announced or facts).get("state"), _whole((announced or facts).get("exit_code"), 1)
    reason = _word((announced or facts).get("reason"))
    if state == "finished" and announced is not None:
        return RunEnd("finished", reason, 0, step) if code == 0 else RunEnd("failed", NOT_UPLOADED, code, step)
    if state == "stopped" and code != 1:
        return RunEnd("interrupted" if reason in _BY_A_PERSON else "stopped", reason, code, step)
    if state in ("stopped", "failed"):
        error = facts.get("error")
        name = error.get("type") if isinstance(error, Mapping) else None
        return RunEnd(failed, _word(name) or reason or "error", code or 1, step)
    return RunEnd(failed, KILLED, 1, step)


def describe_end(end: RunEnd, order: EndHook) -> dict[str, str]:
    """Return the environment variables that tell the command what has happened."""
    return {
        "FINETUNE_OUTCOME": end.outcome,
        "FINETUNE_REASON": end.reason,
        "FINETUNE_EXIT_CODE": str(end.exit_code),
        "FINETUNE_STEP": str(end.step),
        "FINETUNE_RUN_FOLDER": order.run_folder,
        "FINETUNE_RUN_URL": order.url,
        "FINETUNE_STATUS_FILE": f"{order.run_folder}/status.json",
    }


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _word(value: Any) -> str:
    """Return a reason as words alone: it may be the name of anybody's exception.

    >>> _word("signal SIGTERM"), _word("$(reboot)")
    ('signal SIGTERM', 'reboot')
    """
    return re.sub(r"[^\w .-]", "", str(value))[:_LONGEST_REASON].strip() if isinstance(value, str) else ""
