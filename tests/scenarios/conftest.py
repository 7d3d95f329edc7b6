"""The small job, and ways to launch it for real under any strategy."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune.export.verify import verifier
from finetune.report.history import read_events
from finetune.runtime.supervision.heartbeat import VARIABLE
from tests import launching
from tests.sample_records import read_samples
from tests.scenarios.running import Running
from tests.scenarios.trained import forget, run_folder, stay
from tests.small_job import write_job
from tests.verifier_server import use_server

use_server(verifier)

PROGRAM = ("-m", "finetune")
TIMEOUT_SECONDS = 540  # the first DeepSpeed run on a machine compiles for minutes


@dataclass(frozen=True)
class Ended:
    """A launch that is over."""

    code: int
    output: str
    folder: Path

    def events(self, name: str) -> list[dict]:
        return [event for event in read_events(self.folder / "events.jsonl") if event["event"] == name]

    def losses(self) -> list[float]:
        return [float(event["loss"]) for event in self.events("StepTaken")]

    def norms(self) -> list[float]:
        return [float(event["gradient_norm"]) for event in self.events("StepTaken")]

    def last_metrics(self) -> dict[str, float]:
        return self.events("Evaluated")[-1]["metrics"]

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    def environment(self) -> dict:
        return json.loads((self.folder / "environment.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))

    def samples(self) -> dict[int, list[int]]:
        """The samples of each step, on any rank and in any order."""
        return samples_by_step(self.folder)


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    return {
        step: sorted(i for rank in ranks for batch in rank for i in batch)
        for step, ranks in read_samples(folder).items()
    }


def launch_in_turn(
    launch: "Launch", *, name: str, overrides: Sequence[str], stages: Sequence, num_steps: int = 8
) -> Ended:
    """Launch one run under a strategy and number of processes after the other, each up to a step; return the last."""
    for strategy, processes, last in stages:
        stop = [f"train.stop_after_steps={last}"] if last < num_steps else []
        run = launch(strategy, name=name, processes=processes, overrides=[*overrides, *stop])
        assert run.code == 0, run.output
    return run


Launch = Callable[..., Ended]
Begin = Callable[..., Running]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small job, next to its rows."""
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def launch(job: Path) -> Launch:
    """Start the job under a strategy (None: one process without a launcher) and wait for its end.

    Where it `is_cold`, launcher and ranks are fresh interpreters; else they are forked, see tests/launching.py.
    """

    def start(
        strategy: str | None,
        *,
        name: str,
        processes: int = 2,
        overrides: Sequence[str] = (),
        faults: str = "",
        environment: Mapping[str, str] | None = None,
        is_cold: bool = False,
        program: Sequence[str] = PROGRAM,
    ) -> Ended:
        folder, log = job.parent / "runs" / name, job.parent / "logs" / f"{name}.log"
        command = command_of(job, strategy, folder=folder, processes=processes, overrides=overrides, program=program)
        variables = {VARIABLE: faults, **(environment or {})}
        code = launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment=variables, is_cold=is_cold)
        return Ended(code, log.read_text(errors="replace"), folder)

    return start


@pytest.fixture
def trained(job: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Return the folders of tiny finished runs: `full`, `lora`, `merged`. The test may itself build an Accelerator."""
    monkeypatch.setattr("finetune.runtime.distributed.shut_down", stay)
    yield lambda name: run_folder(job, name)
    forget()


@pytest.fixture
def begin(job: Path) -> Iterator[Begin]:
    """Start the job under a strategy and return at once; what still runs at the end of the test is killed."""
    begun: list[Running] = []

    def start(
        strategy: str | None,
        *,
        name: str,
        overrides: Sequence[str] = (),
        faults: str = "",
        program: Sequence[str] = PROGRAM,
    ) -> Running:
        folder, log = job.parent / "runs" / name, job.parent / "logs" / f"{name}.log"
        command = command_of(job, strategy, folder=folder, processes=2, overrides=overrides, program=program)
        begun.append(Running(command, folder=folder, log=log, environment={VARIABLE: faults}))
        return begun[-1]

    yield start
    for running in begun:
        running.kill_all()


def command_of(
    job: Path, strategy: str | None, *, folder: Path, processes: int, overrides: Sequence[str], program: Sequence[str]
) -> list[str]:
    words = [*program, "--config", str(job)]
    for override in [f"run.folder={folder}", *overrides]:
        words += ["--set", override]
    if strategy is None:
        return [sys.executable, *words]
    return launching.accelerate_command(strategy, *words, processes=processes)
