"""What becomes of a job when its launcher has ended: it is over, or the scheduler is to start it again.

Launchers turn every exit code but 0 into 1, so the run's own `status.json` decides where this attempt wrote it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AGAIN = 75
"""Exit code for the scheduler: start the job again. It is EX_TEMPFAIL of sysexits.h, which no run of ours ends with."""

FAILED, USER_MISTAKE, INTERRUPTED = 1, 2, 130

_TAKEN_AWAY = (143, 129)  # SIGTERM of a time limit, a preemption or a spot notice; SIGHUP


@dataclass(frozen=True)
class RunEnd:
    """How the run ended, as far as it wrote it down."""

    exit_code: int | None  # None: it was killed before it could
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """What the scheduler is to do, and what the next decision has to know."""

    exit_code: int
    reason: str
    num_failures: int = 0  # attempts in a row, up to this one, without a checkpoint of a later step
    step: int = 0  # of the newest checkpoint


def read_run_end(facts: Mapping[str, Any]) -> RunEnd | None:
    """Return the end that a `status.json` tells; None for one that is damaged."""
    code, error = facts.get("exit_code"), facts.get("error")
    if code is not None and (isinstance(code, bool) or not isinstance(code, int)):
        return None
    message = error.get("message") if isinstance(error, Mapping) else None
    return RunEnd(code, str(message or facts.get("reason") or facts.get("state") or ""))


def decide(end: RunEnd | None, *, code: int, step: int, last: Decision | None, max_restarts: int) -> Decision:
    """Return what becomes of the job.

    `end` is this attempt's, None where it wrote nothing; `code` is the launcher's exit code, `step` that of the newest
    checkpoint and `last` the decision before. A job is started again after it was stopped by the scheduler, and after
    failures, but not after `max_restarts` attempts in a row that have not gained a step: preempted or failed alike.
    """
    ended = code if end is None else end.exit_code
    reason = (end.reason if end is not None else "") or f"the launcher ended with exit code {code}"
    if ended in (0, USER_MISTAKE, INTERRUPTED):
        return Decision(ended, reason, step=step)
    has_gained = step > (last.step if last is not None else 0)
    failures = 0 if has_gained else 1 + (last.num_failures if last is not None else 0)
    if failures > max_restarts:
        reason = f"{failures} attempts in a row have not gained a step; the last: {reason}"
        return Decision(FAILED, reason, num_failures=failures, step=step)
    outcome = "stopped" if ended in _TAKEN_AWAY else "failed"
    return Decision(AGAIN, f"{outcome} ({reason})", num_failures=failures, step=step)
