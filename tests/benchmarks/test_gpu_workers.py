"""No worker of `benchmarks/gpu.py` outlives it or its turn, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gpu_comparison.cases import cases
from gpu_comparison.workers import Settings, Worker, alive, environment

FAKE = "tests.benchmarks.fake_gpu_worker"


def settings(folder, module=FAKE):
    return Settings(folder, "cpu", True, module=module)


def is_gone(pid):
    """Wait up to ten seconds for the process to end; a zombie has ended."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def pid_of_child(folder):
    for _ in range(200):
        if (folder / "child").exists() and (folder / "child").read_text():
            return int((folder / "child").read_text())
        time.sleep(0.05)
    raise AssertionError("the worker has started nothing")


def test_a_worker_that_is_left_out_ends_without_playing(tmp_path):
    worker = Worker(cases()[0], settings(tmp_path))
    os.close(worker._line)  # nobody says go
    out, _ = worker._process.communicate(timeout=30)
    assert (worker._process.returncode, out) == (0, "ready\n")
    assert not (tmp_path / "child").exists()


@pytest.mark.full
def test_the_real_worker_that_is_left_out_ends_without_playing(tmp_path):
    spec = {"case": cases()[0].record(), "folder": str(tmp_path), "device": "cpu", "tiny": True}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "gpu_comparison.worker", str(tmp_path / "spec.json")]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, env=environment())
    assert (done.returncode, done.stdout) == (0, "ready\n")


def test_a_case_that_times_out_leaves_no_process_running(tmp_path):
    with alive(settings(tmp_path)) as workers:
        record = workers.run(cases()[0], then=None, timeout_seconds=3)
    assert record["error"] == "not done within 3 s"
    assert is_gone(pid_of_child(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_workers_end_with_their_controller(tmp_path, number):
    command = [sys.executable, "-m", "tests.benchmarks.gpu_controller", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts pytest with `nohup` ignores it
    try:
        controller = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
    finally:
        signal.signal(signal.SIGINT, before)
    computing, waiting = map(int, controller.stdout.readline().split())
    child = pid_of_child(tmp_path)
    controller.send_signal(number)
    controller.communicate(timeout=30)
    assert controller.returncode != 0
    assert [is_gone(pid) for pid in (computing, waiting, child)] == [True] * 3


def test_a_worker_that_fails_at_startup_reports_the_reason(tmp_path):
    with alive(settings(tmp_path, module="tests.benchmarks.nothing_of_this_name")) as workers:
        record = workers.run(cases()[0], then=None, timeout_seconds=30)
    assert record["error"].startswith("ended with exit code 1")
    assert "No module named" in record["log"][-1]
