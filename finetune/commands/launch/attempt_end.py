"""`finetune launch next`: decides, when the launcher has ended, whether the scheduler restarts the job.

Launchers turn every exit code but 0 into 1, so the run's own `status.json` decides where this attempt wrote it.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.config.paths import is_url, local_run_folder
from finetune.runtime.files import atomic
from finetune.runtime.files.remote import RemoteFolder
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.terminal import format_json

AGAIN = 75
"""Exit code that requests a restart from the scheduler: EX_TEMPFAIL of sysexits.h, with which no run of ours ends."""

FAILED, USER_MISTAKE, INTERRUPTED = 1, 2, 130

_PREEMPTED = (143, 129)  # SIGTERM of a time limit, a preemption or a spot notice; SIGHUP


@dataclass(frozen=True)
class AttemptEnd:
    """How the run ended, according to its status file."""

    exit_code: int | None  # None: it was killed before it wrote one
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """The instruction to the scheduler, and the counts that the next decision continues."""

    exit_code: int
    reason: str
    num_failures: int = 0  # attempts in a row, up to this one, without a checkpoint of a later step
    step: int = 0  # of the newest checkpoint


def decide_restart(
    end: AttemptEnd | None, *, code: int, step: int, last: Decision | None, max_restarts: int
) -> Decision:
    """Return whether the job is over or is restarted.

    `end` is this attempt's, None if it wrote nothing; `code` is the launcher's exit code, `step` the step of the newest
    checkpoint and `last` the previous decision. A job is restarted after the scheduler stopped it and after failures,
    unless more than `max_restarts` attempts in a row, preempted or failed, have made no progress.
    """
    ended = code if end is None else end.exit_code
    reason = (end.reason if end is not None else "") or f"the launcher ended with exit code {code}"
    if ended in (0, USER_MISTAKE, INTERRUPTED):
        return Decision(ended, reason, step=step)
    has_gained = step > (last.step if last is not None else 0)
    failures = 0 if has_gained else 1 + (last.num_failures if last is not None else 0)
    if failures > max_restarts:
        reason = f"{failures} attempts in a row made no progress; the last one: {reason}"
        return Decision(FAILED, reason, num_failures=failures, step=step)
    outcome = "stopped" if ended in _PREEMPTED else "failed"
    return Decision(AGAIN, f"{outcome} ({reason})", num_failures=failures, step=step)


RECORD = ".launch.json"
"""The last decision, in the run folder or at its URL: each attempt may run on new machines."""

_POLL_SECONDS = 1.0
_DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)


def print_decision(
    run: str,
    *,
    since: float,
    code: int,
    max_restarts: int,
    local_folder: Path | None = None,
    machine_rank: int = 0,
    wait_seconds: float = 60.0,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the decision, and return the exit code for the scheduler: 75 to restart the job.

    `since` is when this attempt began: files that were written before belong to an earlier one. `local_folder` is that
    of the job for a run at a URL. Host 0 decides; the others wait for its decision, and return 75 after a timeout.
    """
    store = RemoteFolder(run) if is_url(run) else None
    folder = local_run_folder(run, str(local_folder) if local_folder is not None else None)
    if machine_rank > 0:
        until = clock() + wait_seconds
        while (record := _read_record(folder, store)) is None or record[0] < since:
            if clock() >= until:
                record = since, Decision(AGAIN, "host 0 has not decided")
                break
            sleep(_POLL_SECONDS)
        decision = record[1]
    else:
        record = _read_record(folder, store)
        decision = decide_restart(
            read_end(folder, since=since),
            code=code,
            step=newest_step(folder),
            last=record[1] if record is not None else None,
            max_restarts=max_restarts,
        )
        now = clock()
        content = format_json({"time": now, "decision": asdict(decision)}, indent=2).encode()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(folder / RECORD, content)
            if store is not None:
                store.upload(folder / RECORD, RECORD)
        except Exception as error:  # a full disk or unreachable storage: the decision itself stands
            print(f"warning: the decision cannot be recorded, so restarts are not counted: {error}", flush=True)
    over = f"the job is over, exit code {decision.exit_code}"
    again = f"restart the job from step {decision.step}"
    print(f"finetune: {again if decision.exit_code == AGAIN else over}: {decision.reason}", flush=True)
    return decision.exit_code


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in the run folder, 0 without one."""
    names = [path.name.removeprefix("step-") for path in (folder / CHECKPOINTS_FOLDER).glob("step-*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def read_end(folder: Path, *, since: float) -> AttemptEnd | None:
    """Return how the run ended by its status file; None if it is damaged, or nothing was written since then."""
    status = read_status(folder)
    code, error, written = status.get("exit_code"), status.get("error"), status.get("time")
    if not isinstance(written, int | float) or written < since or type(code) not in (int, type(None)):
        return None
    message = error.get("message") if isinstance(error, dict) else None
    state = None if code is None else status.get("state")  # of a process that was killed: what it last did
    return AttemptEnd(code, str(message or status.get("reason") or state or ""))


def _read_record(folder: Path, store: RemoteFolder | None) -> tuple[float, Decision] | None:
    """Return the time of the last decision and the decision; None where none can be read."""
    try:
        content = (folder / RECORD).read_bytes() if store is None else store.read(RECORD)
        facts: Mapping[str, Any] = json.loads(content or b"{}")
        return float(facts["time"]), _DECISION.validate_python(facts["decision"])
    except Exception:  # each storage has exceptions of its own
        return None
