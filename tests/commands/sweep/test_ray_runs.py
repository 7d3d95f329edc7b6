"""A sweep on two raylets of this machine, one of which is lost: its results are those of an undisturbed sweep."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.commands.sweep.sweep import SweepRequest, sweep
from finetune.report.history import read_events
from finetune.runtime.supervision.heartbeat import VARIABLE
from finetune.runtime.supervision.status import read_status
from tests import launching
from tests.commands.launch.ray_cluster import RayHosts, losses_of, two_raylets
from tests.launch.cluster import until
from tests.small_job import JOB, write_job

STEPS, SECONDS = 6, 900
AXES = ("train.learning_rate=1e-2,2e-2,3e-2,4e-2", "run.seed=1,2")
PACED_JOB = JOB.replace("steps: 8", f"steps: {STEPS}").replace(
    "checkpoint: {every_steps: 4}", "checkpoint: {every_steps: 2}"
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    pytest.importorskip("ray", reason="ray is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,  # the path of a socket has 107 characters
        two_raylets(Path(folder), pace_seconds=1.0, steps=STEPS) as started,
    ):
        yield started


class Sweep:
    """`finetune sweep --ray` of the job, in the folder `sweep` next to it."""

    def __init__(self, job: Path, *words: str) -> None:
        self.folder, self.output, self.log = job.parent / "sweep", job.parent / "results.json", job.parent / "sweep.log"
        command = [sys.executable, "-m", "finetune", "sweep", "--config", str(job), "--folder", str(self.folder)]
        command += ["--json", *words]
        with self.output.open("wb") as output, self.log.open("ab") as errors:
            self.process = launching.begin(command, output=output, errors=errors, folder=job.parent, is_cold=True)

    def finish(self) -> int:
        try:
            return int(self.process.wait(timeout=SECONDS))
        finally:
            self.process.end()

    def step(self, name: str) -> int:
        return int(read_status(self.folder / "runs" / name).get("step") or 0)


def results_of(text: str) -> dict[str, list[Any]]:
    """Return state, step and values of each run, from the output of `--json`."""
    keys = ("state", "step", "final", "best", "best_step")
    return {run["name"]: [run[key] for key in keys] for run in json.loads(text)["runs"]}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
class TestSweepOnTwoRaylets:
    def test_results_after_the_loss_of_a_host_are_those_of_an_undisturbed_sweep(
        self, hosts: RayHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [word for axis in AXES for word in ("--set", axis)]
        disturbed = Sweep(write_job(tmp_path / "disturbed", text=PACED_JOB), *words, "--ray", hosts.address)
        first = ("learning_rate=0.01,seed=1", "learning_rate=0.01,seed=2")
        until(lambda: min(map(disturbed.step, first)) >= 2, seconds=SECONDS)  # one on each host
        hosts.lose()
        hosts.add()
        assert disturbed.finish() == 0, disturbed.log.read_text()
        log = disturbed.log.read_text()
        assert "8 runs, 8 to do, 2 at once" in log
        assert log.count("its host is lost; it is started again, and resumes") == 1
        runs = disturbed.folder / "runs"
        events = [list(read_events(run / "events.jsonl")) for run in runs.iterdir()]
        num_starts = sorted(sum(event["event"] == "RunStarted" for event in each) for each in events)
        assert num_starts == [1] * 7 + [2]

        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.delenv(VARIABLE)  # which slows the ranks of the raylets down
        job = write_job(tmp_path / "undisturbed", text=PACED_JOB)
        folder = job.parent / "sweep"
        assert sweep(SweepRequest(job, AXES, folder=folder, as_json=True), start=_warm) == 0
        undisturbed = results_of(capsys.readouterr().out)
        assert len(undisturbed) == 8 and results_of(disturbed.output.read_text()) == undisturbed
        for name in undisturbed:
            losses = losses_of(runs / name)
            assert sorted(losses) == list(range(1, STEPS + 1)) and losses == losses_of(folder / "runs" / name)

    def test_ctrl_c_saves_and_a_killed_sweep_is_continued(self, hosts: RayHosts, tmp_path: Path) -> None:
        job, words = write_job(tmp_path, text=PACED_JOB), ("--set", "run.seed=1,2", "--ray", hosts.address)
        begun = Sweep(job, *words)
        until(lambda: begun.step("seed=1") >= 2, seconds=SECONDS)
        os.kill(begun.process.pid, signal.SIGINT)
        assert begun.finish() == 130, begun.log.read_text()
        assert all(state in ("stopped", "interrupted") for state, *_ in results_of(begun.output.read_text()).values())
        step = begun.step("seed=1")
        assert (begun.folder / "runs" / "seed=1" / "checkpoints" / f"step-{step:06d}").is_dir()

        killed = Sweep(job, *words)
        until(lambda: killed.step("seed=1") > step, seconds=SECONDS)
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.finish()
        until(lambda: read_status(begun.folder / "runs" / "seed=1").get("state") == "stopped", seconds=SECONDS)
        last = Sweep(job, *words)
        assert last.finish() == 0, last.log.read_text()
        for name in ("seed=1", "seed=2"):
            events = read_events(begun.folder / "runs" / name / "events.jsonl")
            assert [event["step"] for event in events if event["event"] == "StepTaken"] == list(range(1, STEPS + 1))


def _warm(command: list[str], log: Path, environment: dict[str, str]) -> launching.Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return launching.begin(command, output=output, environment=environment)
