"""`finetune launch ray --submit`: the entrypoint and what is refused, and jobs of a cluster on this machine."""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.commands.launch.ray import RayArguments
from finetune.commands.launch.ray_submit import Submission, ray_words, submit_ray_job
from finetune.errors import UserError
from finetune.registry.accelerate_files import SHIPPED
from finetune.runtime.processes import free_loopback_port
from tests.commands.launch.ray_cluster import DDP, TIMEOUT_SECONDS, RayHosts, RayRun, two_raylets
from tests.launch.cluster import until
from tests.small_job import JOB, write_job

STEPS = 24
PACED_JOB = JOB.replace("steps: 8", f"steps: {STEPS}").replace("every_steps: 4", "every_steps: 2", 1)


def arguments(job: Path, **others: object) -> RayArguments:
    return RayArguments(job, DDP, nodes="1:2", gpus_per_node=1, cpu=True, **others)  # type: ignore[arg-type]


def test_the_entrypoint_is_the_same_command_with_absolute_paths(tmp_path: Path) -> None:
    words = ray_words(arguments(tmp_path / "job.yaml", override=("run.seed=3",), stop=60.0))
    assert shlex.join(words) == (
        f"python -m finetune launch ray --config {tmp_path}/job.yaml --accelerate {DDP} --nodes 1:2 --gpus-per-node 1 "
        "--set run.seed=3 --stop 60 --max-failures 10 --cpu"
    )


def test_paths_are_relative_to_a_folder_that_is_sent_to_the_hosts(tmp_path: Path) -> None:
    shipped = RayArguments(tmp_path / "jobs" / "job.yaml", SHIPPED / "ddp.yaml", nodes="2", gpus_per_node=8)
    assert ray_words(shipped, folder=tmp_path)[5:9] == ["--config", "jobs/job.yaml", "--accelerate", "ddp"]
    with pytest.raises(UserError, match=r"--accelerate .*ddp.yaml: it is not in --working-dir"):
        ray_words(arguments(tmp_path / "job.yaml"), folder=tmp_path)


def test_submitting_a_local_job_or_a_secret_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    with pytest.raises(UserError, match="--local starts Ray for one command alone"):
        submit_ray_job(arguments(job, local=True), Submission())
    with pytest.raises(UserError, match=r"run\.folder: .* is in --working-dir, and each host has a copy"):
        submit_ray_job(arguments(job), Submission(working_dir=tmp_path))
    with pytest.raises(UserError, match="the entrypoint, line 1: this is a secret"):
        secret = ("run.on_end=push --password hunter2hunter2",)
        submit_ray_job(arguments(job, override=secret), Submission())


def test_a_dashboard_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    address = f"127.0.0.1:{free_loopback_port()}"
    with pytest.raises(UserError, match=rf"--submit: http://{address}: .*Name the host of Ray's head"):
        submit_ray_job(arguments(write_job(tmp_path), address=address), Submission())


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[RayHosts, str]]:
    pytest.importorskip("ray", reason="ray is not installed")
    port = free_loopback_port()
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,  # the path of a socket has 107 characters
        two_raylets(Path(folder), pace_seconds=1.0, steps=STEPS, dashboard_port=port) as hosts,
    ):
        yield hosts, f"http://127.0.0.1:{port}"


def submit(job: Path, cluster: tuple[RayHosts, str], *words: str) -> RayRun:
    hosts, dashboard = cluster
    return RayRun(job, hosts, "--submit", "--address", dashboard, *words)


def identifier_of(run: RayRun) -> str:
    until(lambda: "submitted: " in run.log.read_text(), seconds=TIMEOUT_SECONDS)
    return run.log.read_text().split("submitted: ")[1].split()[0]


@pytest.mark.slow
@pytest.mark.distributed
class TestJobsOfACluster:
    def test_a_mistake_of_the_user_ends_the_job_once(self, cluster: tuple[RayHosts, str], tmp_path: Path) -> None:
        job = write_job(tmp_path, text=PACED_JOB)
        (tmp_path / "train.jsonl").write_text('{"messages": 7}\n')
        run = submit(job, cluster)
        assert run.finish() == 2, run.log.read_text()
        assert run.log.read_text().count("finetune: attempt ") == 1
        assert ": FAILED" in run.log.read_text() and "finetune: exit code 2; state failed" in run.log.read_text()

    def test_a_job_that_is_stopped_saves_first_and_resumes_when_it_is_submitted_again(
        self, cluster: tuple[RayHosts, str], tmp_path: Path
    ) -> None:
        run = submit(write_job(tmp_path, text=PACED_JOB), cluster)
        run.wait_for_step(3)
        identifier, client = identifier_of(run), _client(cluster)
        info = client.get_job_info(identifier)
        assert info.status == "RUNNING" and info.metadata["run_folder"] == str(run.folder)
        stop = ["job", "stop", "--address", cluster[1], "--no-wait", identifier]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *stop], check=True, timeout=TIMEOUT_SECONDS)
        assert run.finish() == 143, run.log.read_text()
        log, stopped = run.log.read_text(), run.status()
        assert ": STOPPED" in log and f"state stopped; step {stopped['step']}; reason signal SIGTERM; loss " in log
        assert (run.folder / "checkpoints" / f"step-{stopped['step']:06d}").is_dir()
        assert stopped["step"] < STEPS and stopped["exit_code"] == 143

        again = submit(tmp_path / "job.yaml", cluster, "--detach")
        assert again.finish() == 0, again.log.read_text()
        identifier = identifier_of(again)
        until(lambda: client.get_job_info(identifier).status.is_terminal(), seconds=TIMEOUT_SECONDS)
        assert client.get_job_info(identifier).driver_exit_code == 0, client.get_job_logs(identifier)
        assert [event["step"] for event in again.events("StepTaken")] == list(range(1, STEPS + 1))
        assert "finetune: exit code 0; state finished; step 24" in client.get_job_logs(identifier)

    def test_ranks_run_in_their_copies_of_a_folder_that_is_sent(
        self, cluster: tuple[RayHosts, str], tmp_path: Path
    ) -> None:
        job = write_job(tmp_path / "project", text=PACED_JOB)
        words = ["--working-dir", str(job.parent), "--accelerate", "ddp", "--set", f"run.folder={tmp_path}/run"]
        run = submit(job, cluster, *words)
        run.folder = tmp_path / "run"
        run.wait_for_step(2)
        ranks = [psutil.Process(peer["pid"]) for peer in run.status()["ranks"]]
        copies = {rank.cwd() for rank in ranks}
        assert run.finish() == 0, run.log.read_text()
        assert [event["step"] for event in run.events("StepTaken")] == list(range(1, STEPS + 1))
        assert all(Path(copy).name.startswith("_ray_pkg_") for copy in copies), copies


def _client(cluster: tuple[RayHosts, str]) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(cluster[1])
