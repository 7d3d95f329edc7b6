"""A launch that goes on while the test acts on it."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from finetune.report.history import read_events
from tests import launching

WAIT_SECONDS = 300.0  # the first DeepSpeed run on a machine compiles


class Running:
    """A launch in a session of its own; what it has written can be read at any time."""

    def __init__(self, command: Sequence[str], *, folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self.process = launching.begin(command, output=file, environment=environment)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def status(self) -> dict:
        try:
            return json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def steps(self) -> int:
        path = self.folder / "events.jsonl"
        events = read_events(path) if path.exists() else []
        return max((event["step"] for event in events if event["event"] == "StepTaken"), default=0)

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))

    def pids(self) -> list[int]:
        """The processes of the run, as the status file names them."""
        return [peer["pid"] for peer in self.status().get("ranks", ())]

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so; fail with what the run has said when it never is."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def until_ended(self) -> int:
        """Wait until the launcher has ended, and return its exit code."""
        self.until(lambda: self.process.poll() is not None)
        return int(self.process.returncode)

    def until_gone(self, pids: Sequence[int]) -> None:
        """Wait until none of the processes lives."""
        self.until(lambda: not any(has_process(pid) for pid in pids))

    def kill_all(self) -> None:
        for pid in [*self.pids(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.end()


def has_process(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
