"""The command of each host, and the processes that it becomes."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune.launch.supervisor.agent import Agent, Job, launch_command, network_environment
from finetune.launch.supervisor.members import Attempt

JOB = Job(("-m", "finetune", "--config", "job.yaml"), Path("hsdp.yaml"), ranks_per_host=8, is_hybrid=True)
ATTEMPT = Attempt(3, ("a", "b"), ("10.0.0.1", "10.0.0.2"), 29500, "starts")

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def test_each_host_gets_its_number_and_the_address_of_the_first() -> None:
    words = launch_command(JOB, ATTEMPT, rank=1)
    options = dict(zip(words[3:-4:2], words[4:-4:2], strict=True))
    assert words[-4:] == ["-m", "finetune", "--config", "job.yaml"]
    assert options == {
        "--config_file": "hsdp.yaml",
        "--num_machines": "2",
        "--num_processes": "16",
        "--machine_rank": "1",
        "--main_process_ip": "10.0.0.1",
        "--main_process_port": "29500",
        "--parallelism_config_dp_replicate_size": "2",
        "--parallelism_config_dp_shard_size": "8",
    }


def test_deepspeed_is_launched_by_each_host_for_itself() -> None:
    words = launch_command(Job(("job",), Path("zero2.yaml"), 2, is_deepspeed=True), ATTEMPT, rank=0)
    assert words[words.index("--deepspeed_multinode_launcher") + 1] == "standard"


def test_a_killed_launcher_takes_ranks_with_sessions_of_their_own_along() -> None:
    agent = Agent([sys.executable, "-c", PARENT], environment={})
    deadline, ranks = time.monotonic() + 30, []
    while not ranks and time.monotonic() < deadline:  # the tests' server may be a child of this process, too
        launchers = [child for child in psutil.Process().children() if PARENT in child.cmdline()]
        ranks = [rank for launcher in launchers for rank in launcher.children()]
    agent.kill()
    assert len(ranks) == 1 and agent.exit_code() == -9
    assert not ranks[0].is_running() or ranks[0].status() == psutil.STATUS_ZOMBIE


def test_variables_that_are_already_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    environment = network_environment("eth0", stop_seconds=180)
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0" and environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "175"
    assert "NCCL_SOCKET_IFNAME" not in environment
