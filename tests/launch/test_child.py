"""Child runs: their command, their log, and that no process of a child outlives its parent or its killing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune.launch.child import child_process, end_of_log, run_child, train_command

GRANDPARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
PARENT = """
import sys, time
from pathlib import Path
from finetune.launch.child import start_child
print(start_child([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_process_is_started_without_a_launcher():
    command = train_command(Path("job.yaml"), overrides=["train.steps=3"])
    assert command == [sys.executable, "-m", "finetune", "train", "--config", "job.yaml", "--set", "train.steps=3"]


def test_several_processes_are_started_by_accelerate_on_the_port():
    command = train_command(Path("job.yaml"), accelerate_config=Path("ddp.yaml"), num_processes=2, port=29501)
    launcher = ["accelerate.commands.launch", "--config_file", "ddp.yaml", "--num_processes", "2"]
    assert command[1:] == ["-m", *launcher, "--main_process_port", "29501", *train_command(Path("job.yaml"))[1:]]


def test_a_child_has_its_environment_and_writes_a_new_log(tmp_path: Path):
    log = tmp_path / "logs" / "child.log"
    for text in ("first", "second"):
        command = [sys.executable, "-c", "import os; print(os.environ['TEXT']); raise SystemExit(3)"]
        assert run_child(command, log=log, timeout_seconds=60, environment={"TEXT": text}) == 3
    assert log.read_text() == "second\n"


def test_a_child_that_takes_too_long_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_child(command, log=tmp_path / "log", timeout_seconds=0.1) == 124


def test_a_process_that_the_child_started_in_another_session_is_killed_with_it(tmp_path: Path):
    log = tmp_path / "log"
    with child_process([sys.executable, "-c", GRANDPARENT], log=log):
        deadline = time.monotonic() + 30
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        grandchild = int(log.read_text())
        assert not has_ended(grandchild)
    wait_until_ended(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports a parent's death")
def test_a_child_is_terminated_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_ended(child)


def test_the_end_of_a_log_is_its_last_error_or_else_its_last_lines(tmp_path: Path):
    log = tmp_path / "run.log"
    assert end_of_log(log) == ""
    log.write_text("error: earlier\n\nstep 1\nerror: 2 problems\n  line 3\nTraceback of the launcher\n")
    assert end_of_log(log) == "2 problems\n  line 3\nTraceback of the launcher"
    assert end_of_log(log, max_lines=2) == "2 problems\n  line 3"
    log.write_text("".join(f"step {number}\n" for number in range(9000)))
    assert end_of_log(log, max_lines=2) == "step 8998\nstep 8999"
