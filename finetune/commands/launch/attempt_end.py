"""`finetune launch next`: after the launcher has ended, whether the scheduler is to start the job again."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.config.paths import is_url, local_run_folder
from finetune.launch.jobs.decision import AGAIN, Decision, RunEnd, decide, read_run_end
from finetune.runtime.files import atomic
from finetune.runtime.files.read import read_json
from finetune.runtime.files.remote import RemoteFolder
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.runtime.supervision.status import STATUS_FILE
from finetune.runtime.text.terminal import format_json

RECORD = ".launch.json"
"""The last decision, in the run folder, or at its URL: machines may be new ones each time."""

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
    """Print what becomes of the job, and return the exit code for the scheduler: 75 to start it again.

    `since` is when this attempt began: what was written before is of an earlier one. `local_folder` is the job's own
    for a run at a URL. Host 0 decides; the others wait for its decision, and return 75 where it does not come.
    """
    store = RemoteFolder(run) if is_url(run) else None
    folder = local_run_folder(run, str(local_folder) if local_folder is not None else None)
    if machine_rank > 0:
        decision = _wait_for_decision(
            lambda: _read_record(folder, store), since=since, until=clock() + wait_seconds, clock=clock, sleep=sleep
        )
    else:
        record = _read_record(folder, store)
        decision = decide(
            _read_end(folder, since=since),
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
        except Exception as error:  # a full disk, a storage that is away: the decision itself stands
            print(f"warning: the decision cannot be recorded, so restarts are not counted: {error}", flush=True)
    print(_sentence(decision), flush=True)
    return decision.exit_code


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in the run folder, 0 without one."""
    names = [path.name.removeprefix("step-") for path in (folder / CHECKPOINTS_FOLDER).glob("step-*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _read_end(folder: Path, *, since: float) -> RunEnd | None:
    try:
        facts = read_json(folder / STATUS_FILE)
        written = float(facts["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return read_run_end(facts) if written >= since else None


def _read_record(folder: Path, store: RemoteFolder | None) -> tuple[float, Decision] | None:
    """Return when the last decision was made, and which; None where there is none that can be read."""
    try:
        content = (folder / RECORD).read_bytes() if store is None else store.read(RECORD)
        facts: Mapping[str, Any] = json.loads(content or b"{}")
        return float(facts["time"]), _DECISION.validate_python(facts["decision"])
    except Exception:  # each storage has exceptions of its own
        return None


def _wait_for_decision(
    read: Callable[[], tuple[float, Decision] | None],
    *,
    since: float,
    until: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Decision:
    while True:
        record = read()
        if record is not None and record[0] >= since:
            return record[1]
        if clock() >= until:
            return Decision(AGAIN, "host 0 has not decided")
        sleep(_POLL_SECONDS)


def _sentence(decision: Decision) -> str:
    if decision.exit_code == AGAIN:
        return f"finetune: the job is to be started again from step {decision.step}: {decision.reason}"
    return f"finetune: the job is over, exit code {decision.exit_code}: {decision.reason}"
