"""Two raylets on this machine as the hosts of a Ray cluster, and `finetune launch ray` on them."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.commands.launch.ray import HEAD_SETTINGS
from finetune.report.history import read_events
from finetune.runtime.supervision.heartbeat import VARIABLE
from finetune.runtime.supervision.status import read_status
from tests import launching
from tests.launch.cluster import until

DDP = Path(__file__).parents[3] / "accelerate_configs" / "ddp.yaml"
TIMEOUT_SECONDS = 300


class RayHosts:
    """A cluster of two raylets with a CPU each."""

    def __init__(self, cluster: Any, others: list[Any]) -> None:
        self._cluster, self._others = cluster, others
        self.address: str = cluster.address

    def add(self) -> None:
        """Start another raylet."""
        self._others.append(self._cluster.add_node(num_cpus=1, num_gpus=0))

    def lose(self) -> float:
        """Kill the second raylet with all its processes at once, as a power failure would; return the time."""
        raylet = psutil.Process(self._others[0].all_processes["raylet"][0].process.pid)
        lost = [raylet, *raylet.children(recursive=True)]
        at = time.time()
        for process in lost:
            with suppress(psutil.Error):
                process.kill()
        self._cluster.remove_node(self._others.pop(0), allow_graceful=False)
        return at


@contextmanager
def two_raylets(folder: Path, *, pace_seconds: float, steps: int) -> Iterator[RayHosts]:
    """Start the raylets, whose ranks take at least this time for each step; all their processes end afterwards."""
    from ray.cluster_utils import Cluster

    settings = {
        **launching.SETTINGS,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",  # 15 by default: beside other work, ranks would hardly run
        VARIABLE: "; ".join(f"data step={step} do=sleep seconds={pace_seconds}" for step in range(1, steps + 1)),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    launching.start_warm_server()  # which is not to end with the cluster
    started = {child.pid for child in psutil.Process().children()}
    head: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "_system_config": HEAD_SETTINGS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = cluster.add_node(num_cpus=1, num_gpus=0)
        cluster.wait_for_nodes()
        yield RayHosts(cluster, [other])
    finally:
        children = [child for child in psutil.Process().children() if child.pid not in started]
        left = [process for child in children for process in (child, *child.children(recursive=True))]
        cluster.shutdown()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class RayRun:
    """The small job, started by `finetune launch ray` on these hosts."""

    def __init__(self, job: Path, hosts: RayHosts, *words: str) -> None:
        self.folder, self.log = job.parent / "runs" / "job", job.parent / "ray.log"
        command = [sys.executable, "-m", "finetune", "launch", "ray", "--config", str(job), "--accelerate", str(DDP)]
        command += ["--nodes", "1:2", "--gpus-per-node", "1", "--cpu", "--address", hosts.address, *words]
        with self.log.open("wb") as output:
            self.process = launching.begin(command, output=output, folder=job.parent, is_cold=True)

    def wait_for_step(self, step: int) -> None:
        def has_taken_step() -> bool:
            has_ended = self.process.poll() is not None
            has_step = any(event["step"] >= step for event in self.events("StepTaken"))
            assert has_step or not has_ended, self.log.read_text()
            return has_step

        until(has_taken_step, seconds=TIMEOUT_SECONDS)

    def finish(self) -> int:
        """Return the exit code; no process of the command is left."""
        try:
            return int(self.process.wait(timeout=TIMEOUT_SECONDS))
        finally:
            self.process.end()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def events(self, name: str) -> list[dict[str, Any]]:
        return _events(self.folder, name)

    def losses(self) -> dict[int, float]:
        return losses_of(self.folder)

    def status(self) -> dict[str, Any]:
        return read_status(self.folder)


def losses_of(run_folder: Path) -> dict[int, float]:
    """Return the loss of each step; of a step that was taken again, the later one."""
    return {event["step"]: event["loss"] for event in _events(run_folder, "StepTaken")}


def _events(run_folder: Path, name: str) -> list[dict[str, Any]]:
    path = run_folder / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []
