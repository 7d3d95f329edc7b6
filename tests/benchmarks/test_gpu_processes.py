"""No process of `benchmarks/gpu.py` outlives it or its time, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.benchmarks.gpu_controller import compute_forever

from gpu_comparison.processes import UNFINISHED, Processes


def is_gone(pid):
    """Wait up to ten seconds for the process to end; a zombie has ended."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def started_processes(folder):
    for _ in range(400):
        if (folder / "processes").exists():
            return list(map(int, (folder / "processes").read_text().split()))
        time.sleep(0.05)
    raise AssertionError("nothing was started")


def add(one, other, finish):
    print("adding")
    finish({"sum": one + other, "pid": os.getpid()})


def return_too_early(finish):
    pass


def fail(finish):
    raise ValueError("a reason\nand more")


def die(finish):
    os._exit(7)


def use_cuda(finish):
    if multiprocessing.get_start_method(allow_none=True) != "spawn":
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use the 'spawn' start method")
    finish({"name": "a GPU"})


def test_a_record_comes_from_another_process_whose_output_goes_to_the_log(tmp_path, capfd):
    record = Processes(tmp_path).run(add, 2, 3, timeout_seconds=30)
    assert record["sum"] == 5
    assert record["pid"] != os.getpid()
    assert capfd.readouterr().out == ""
    assert (tmp_path / "log.txt").read_text() == "adding\n"


@pytest.mark.parametrize(
    ("function", "error"),
    [(return_too_early, UNFINISHED), (fail, "ValueError: a reason"), (die, "ended with exit code 7")],
)
def test_a_process_without_a_record_is_an_error_with_its_log(tmp_path, function, error):
    record = Processes(tmp_path).run(function, timeout_seconds=30)
    assert record["error"] == error
    assert ("ValueError: a reason" in record["log"]) == (function is fail)


def test_a_process_that_times_out_leaves_none_running(tmp_path):
    record = Processes(tmp_path).run(compute_forever, tmp_path, timeout_seconds=3)
    assert record["error"] == "not done within 3 s"
    assert [is_gone(pid) for pid in started_processes(tmp_path)] == [True] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_processes_end_with_their_controller(tmp_path, number):
    command = [sys.executable, "-m", "tests.benchmarks.gpu_controller", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts pytest with `nohup` ignores it
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        controller = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    processes = started_processes(tmp_path)
    controller.send_signal(number)
    controller.wait(timeout=30)
    assert controller.returncode != 0
    assert [is_gone(pid) for pid in processes] == [True] * 2


def test_where_cuda_was_initialized_before_the_fork_new_interpreters_are_started(tmp_path):
    processes = Processes(tmp_path)
    assert processes.run(use_cuda, timeout_seconds=60) == {"name": "a GPU"}
    assert processes._start == "spawn"
