"""`run.on_end`: the command that rank 0 runs, once, when the run has ended in any way but being killed.

status.json has `on_end: true` until then, so that a launcher of ours can run it in place of a rank 0 that was killed.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.runtime.run_folder import own_attempt
from finetune.runtime.supervision.status import (
    FINISHED,
    INTERRUPTED,
    KILLED,
    STATUS_FILE,
    STOPPED,
    StatusFile,
    read_status,
)
from finetune.runtime.text.redact import redact_foreign
from finetune.runtime.text.terminal import printable

TIMEOUT_SECONDS = 600.0
TIMED_OUT, CANNOT_RUN = 124, 127

_PENDING = "on_end"
_LAUNCHER_VARIABLE = re.compile(
    r"((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|CROSS_(RANK|SIZE)"
    r"|(TORCHELASTIC|ACCELERATE|ROLE|FSDP|PARALLELISM_CONFIG|TORCH_NCCL)_.*|FINETUNE_ATTEMPT(_FOLDER)?"
)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: finished, failed, failed_start (before training), stopped, or interrupted by Ctrl-C."""

    outcome: str
    reason: str
    exit_code: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.outcome} ({self.reason}, step {self.step}, exit code {self.exit_code})"


class EndCommand:
    """The command of `run.on_end` on rank 0; without one its methods do nothing."""

    def __init__(self, command: str | None, status: StatusFile, *, folder: Path, url: str = "") -> None:
        self._command = command
        self._status = status
        self._folder = folder
        self._url = url
        self._lock = threading.Lock()
        if command is not None:
            status.add({_PENDING: True})

    def run(self, exit_code: int) -> None:
        """Run the command, once, and wait for it; a launcher that may start the run again decides itself."""
        with self._lock:  # the main thread and the watchdog may both end the process
            command = self._command
            if command is None or own_attempt():
                return
            end = end_of_run(read_status(self._folder), exit_code=exit_code)
            if end.outcome == "finished" or not _may_restart(os.environ):
                self.call_off()
                run_command(command, end, folder=self._folder, url=self._url)

    def call_off(self) -> None:
        """Run no command at the end."""
        if self._command is not None:
            self._command = None
            self._status.add({_PENDING: False})


def run_if_pending(command: str | None, folder: Path, *, since: float, exit_code: int, url: str = "") -> None:
    """Run the command, from the launcher, if the run that has written its status `since` then did not run it."""
    facts = read_status(folder)
    if command is not None and facts.get(_PENDING) is True and facts.get("time", 0.0) >= since:
        run_command(command, end_of_run(facts, exit_code=exit_code), folder=folder, url=url)


def end_of_run(status: Mapping[str, Any], *, exit_code: int) -> RunEnd:
    """Return the end that status.json records; `exit_code` is that of the process that reads it.

    A status without an end belongs to a run that was killed. A finished run with another exit code than 0 was not
    uploaded.
    """
    state, error = status.get("state"), status.get("error")
    reason, step = str(error["type"] if error else status.get("reason")), int(status.get("step") or 0)
    code = int(status.get("exit_code") or exit_code)
    failed = "failed_start" if status.get("num_steps") is None else "failed"
    if state == FINISHED:
        is_complete = code == 0
        return RunEnd("finished" if is_complete else "failed", reason if is_complete else "upload failed", code, step)
    if state == STOPPED and code != 1:
        outcome = INTERRUPTED if reason in (INTERRUPTED, "signal SIGINT") else "stopped"
        return RunEnd(outcome, reason, code, step)
    if status.get("exit_code") is None:
        return RunEnd(failed, KILLED, code or 1, step)
    return RunEnd(failed, reason, code, step)


def _may_restart(variables: Mapping[str, str]) -> bool:
    """Return whether torchelastic starts the run again after a failure."""
    return int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(variables.get("TORCHELASTIC_MAX_RESTARTS", 0))


def command_environment(variables: Mapping[str, str], end: RunEnd, *, folder: Path, url: str = "") -> dict[str, str]:
    """Return the environment of the command: that of the run without variables of launchers, and the end of the run."""
    plain = {name: value for name, value in variables.items() if not _LAUNCHER_VARIABLE.fullmatch(name)}
    return plain | {
        "FINETUNE_OUTCOME": end.outcome,
        "FINETUNE_REASON": end.reason,
        "FINETUNE_EXIT_CODE": str(end.exit_code),
        "FINETUNE_STEP": str(end.step),
        "FINETUNE_RUN_FOLDER": str(folder),
        "FINETUNE_RUN_URL": url,
        "FINETUNE_STATUS_FILE": str(folder / STATUS_FILE),
    }


def run_command(
    command: str, end: RunEnd, *, folder: Path, url: str = "", timeout_seconds: float = TIMEOUT_SECONDS
) -> int:
    """Run the command by `/bin/sh` and return its exit code: 124 after a timeout, 127 if it cannot be run.

    Its output is in that of the run. It has a session of its own, so that it survives a launcher that kills the ranks.
    """
    _log(f"{end}; runs {redact_foreign(command)}")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            env=command_environment(os.environ, end, folder=folder, url=url),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        _log(f"warning: the command cannot be run: {error}")
        return CANNOT_RUN
    try:
        code = process.wait(timeout_seconds)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        code = TIMED_OUT
    seconds = time.monotonic() - started
    if code:
        how = "was killed" if code == TIMED_OUT else f"failed with exit code {code}"
        _log(f"warning: the command {how} after {seconds:.1f} s")
    return code


def _log(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        print(printable(f"run.on_end: {text}"), file=sys.stderr, flush=True)
