"""Launches of one run, for a supervisor that kills some of them: the launch, its ranks, and what it left on disk."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune.report.jsonl import read_events
from finetune.runtime.processes import free_port

ROOT = Path(__file__).parents[1]
LAUNCH_SECONDS, END_SECONDS = 300.0, 90.0
BLINK_SECONDS = 0.002


@dataclass(frozen=True)
class Job:
    """A job under a strategy such as `zero3:2`, in a run folder."""

    config: Path
    overrides: tuple[str, ...]
    place: str
    folder: Path

    def events(self, name: str, *, start: int = 0) -> list[dict[str, Any]]:
        """Return the run's events of this name but the first `start`, over all its launches."""
        path = self.folder / "events.jsonl"
        found = read_events(path) if path.exists() else []
        return [event for event in found if event["event"] == name][start:]

    def checkpoints(self) -> dict[Path, bool]:
        """Return what bears a checkpoint's name, oldest first, and whether each is whole, without asking finetune."""
        return {path: is_whole(path) for path in sorted((self.folder / "checkpoints").glob("step-*"))}


class Attempt:
    """One launch of the job, running."""

    def __init__(self, job: Job, *, log: Path) -> None:
        self.job = job
        self.log = log
        self.started = time.monotonic()
        self._num_steps = len(job.events("StepTaken"))
        strategy, _, processes = job.place.partition(":")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
        command += ["--main_process_port", str(free_port()), "-m", "finetune", "--config", str(job.config)]
        for override in (*job.overrides, f"run.folder={job.folder}"):
            command += ["--set", override]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )

    @property
    def is_over(self) -> bool:
        """Tell whether the launcher has ended."""
        return self._process.poll() is not None

    def has_stepped(self) -> bool:
        """Tell whether this launch has taken a step."""
        return len(self.job.events("StepTaken")) > self._num_steps

    def wait(self, until: Callable[[], bool], *, seconds: float) -> None:
        """Return when it has come true, the launch is over, or so many seconds have passed."""
        end = time.monotonic() + seconds
        while not (self.is_over or until() or time.monotonic() > end):
            time.sleep(BLINK_SECONDS)

    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written."""
        return any((self.job.folder / "checkpoints").glob(".staging-*"))

    def ranks(self) -> dict[int, int]:
        """Return the processes that train, by rank; none before the launcher has started them."""
        return dict(sorted(self._ranks()))

    def kill(self, pids: list[int]) -> None:
        """Send SIGKILL to these processes of this launch."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> float | None:
        """Wait until the launch is over and return the seconds; None, and all of it is killed, where it never ends."""
        started = time.monotonic()
        try:
            self._process.wait(END_SECONDS)
            return time.monotonic() - started
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ranks(self) -> Iterator[tuple[int, int]]:
        with suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error, KeyError):
                    if process.parent().pid == self._process.pid:
                        yield int(process.environ()["RANK"]), process.pid


def is_whole(checkpoint: Path) -> bool:
    """Tell whether every file has the digest that the manifest gives it."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        digests = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in manifest["files"]}
        return all(digests[name] == facts["sha256"] for name, facts in manifest["files"].items())
    except (OSError, ValueError):
        return False


def state_digest(checkpoint: Path) -> str:
    """Return the digest of parameters, optimizer state, step and samples in the manifest."""
    return str(json.loads((checkpoint / "manifest.json").read_text())["state_sha256"])
