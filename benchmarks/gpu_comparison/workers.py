"""The processes of the cases: one computes while the next imports; none outlives `benchmarks/gpu.py`.

A worker waits on a pipe for its turn. Where the other end closes, because its case is left out or this process ended in
whatever way, it ends itself with all that it has started.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_comparison.cases import UNFINISHED, Case
from gpu_comparison.turns import GO

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Settings:
    """What all workers are given."""

    work: Path  # a folder for whatever they write
    device: str
    is_tiny: bool
    module: str = "gpu_comparison.worker"


class Worker:
    """The process of a case: it imports what it needs, and waits."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.case = case
        name = case.name.replace(" ", "-").replace(",", "")
        spec, self._log = settings.work / f"{name}.json", settings.work / f"{name}.log"
        folder = str(settings.work.resolve())
        spec.write_text(
            json.dumps({"case": case.record(), "folder": folder, "device": settings.device, "tiny": settings.is_tiny})
        )
        listening, self._line = os.pipe()
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", settings.module, str(spec)],
                    stdin=listening,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(),
                    start_new_session=True,  # Ctrl-C is for this process, which ends its workers
                )
        finally:
            os.close(listening)

    def result(self, *, timeout_seconds: float) -> dict[str, Any]:
        """Let it go and return its record, or why there is none; nothing of it is left afterwards."""
        started = time.monotonic()
        try:
            with suppress(BrokenPipeError):  # it has failed already, and its log says why
                os.write(self._line, GO)
            out, _ = self._process.communicate(timeout=max(1.0, timeout_seconds))
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {timeout_seconds:.0f} s", "log": self._tail()}
        finally:
            self.end()
        lines = out.splitlines()
        if len(lines) < 2:
            return {"error": f"ended with exit code {self._process.returncode}", "log": self._tail()}
        record: dict[str, Any] = json.loads(lines[-1])
        if "error" in record:
            record["log"] = self._tail()
        if record.get("error") == UNFINISHED:
            record["error"] += f" ({self._tail()[-1]})"
        return {**record, "case_seconds": time.monotonic() - started}

    def end(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with suppress(OSError):
            os.close(self._line)

    def _tail(self) -> list[str]:
        return self._log.read_text(errors="replace").strip().splitlines()[-25:] or ["it says nothing"]


class Workers:
    """The workers that are alive: at most one that computes and one that imports."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._alive: dict[str, Worker] = {}

    def run(self, case: Case, *, then: Case | None, timeout_seconds: float) -> dict[str, Any]:
        """Return the case's record; the process of the case that follows imports meanwhile."""
        worker = self._of(case)
        if then is not None:
            self._of(then)
        try:
            return worker.result(timeout_seconds=timeout_seconds)
        finally:
            del self._alive[case.name]

    def end(self) -> None:
        """End all that are left."""
        for worker in self._alive.values():
            worker.end()
        self._alive.clear()

    def _of(self, case: Case) -> Worker:
        """Return the case's worker; a worker that was started for another case than the one that came is ended."""
        if case.name not in self._alive:
            self._alive[case.name] = Worker(case, self._settings)
        return self._alive[case.name]


@contextmanager
def alive(settings: Settings) -> Iterator[Workers]:
    """Give workers; none of them is left when the context ends, be it by an error, by Ctrl-C or by SIGTERM."""
    workers = Workers(settings)
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield workers
    finally:
        workers.end()
        signal.signal(signal.SIGTERM, before)


def _raise_exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def environment() -> dict[str, str]:
    """Return the environment of a worker: this repository first, no network."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")))
        ),
    }
