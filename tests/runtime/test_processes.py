"""A process ends with its launcher, but not with the shell that started it."""

import os
import signal
import subprocess
import sys

import pytest

from finetune.runtime.processes import ELASTIC_VARIABLE, ForkBlockingSignals, ignore_run_signals, is_launcher, launch_id

CHILD = """
import signal, sys
from finetune.runtime.processes import stop_with_launcher
signal.signal(signal.SIGTERM, lambda number, frame: (print("told", flush=True), sys.exit()))
stop_with_launcher()
print("ready", flush=True)
while sys.stdin.readline():
    print("lives", flush=True)
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python", "-m", "accelerate.commands.launch", "--num_processes", "2"], True),
        (["/usr/bin/python", "/usr/bin/torchrun", "train.py"], True),
        (["accelerate", "launch"], True),
        (["bash", "-c", "python -m finetune --config accelerate"], False),
        (["python", "-m", "pytest", "tests", "x", "torchrun"], False),
    ],
)
def test_launchers_are_known_by_their_command_line(command, expected):
    assert is_launcher(command) is expected


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize(("is_launched", "answer"), [(True, "told\n"), (False, "lives\n")])
def test_a_process_gets_sigterm_when_its_launcher_dies_but_not_when_its_shell_does(is_launched, answer):
    variables = {name: value for name, value in os.environ.items() if name != ELASTIC_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**variables, **({ELASTIC_VARIABLE: "none"} if is_launched else {})},
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if not is_launched:
            parent.stdin.write("still there?\n")
            parent.stdin.flush()
        assert parent.stdout.readline() == answer


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not forked")
def test_a_signal_during_its_start_does_not_end_a_data_loading_process():
    def work():
        os.kill(os.getpid(), signal.SIGTERM)  # before it ignores anything, as a launcher that signals the group
        ignore_run_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0 if not signal.pthread_sigmask(signal.SIG_BLOCK, []) else 3)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process = ForkBlockingSignals().Process(target=work)
    process.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    process.join()
    assert process.exitcode == 0


def test_a_launch_has_one_name_for_all_its_processes_and_another_launch_has_another():
    many = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    first, second = (launch_id(many, host="a", pid=pid, parent=7) for pid in (8, 9))
    assert first == second
    assert launch_id(many, host="a", pid=12, parent=11) != first
    far = {**many, "MASTER_ADDR": "10.0.0.1"}
    assert launch_id(far, host="a", pid=8, parent=7) == launch_id(far, host="b", pid=3, parent=2)
    assert launch_id({}, host="a", pid=8, parent=7) != launch_id({}, host="a", pid=9, parent=7)


PROGRAM = """
import atexit, sys, threading, time
from finetune.runtime.processes import exit_process

def fail():
    raise RuntimeError("a handler fails")

atexit.register(print, "registered first")
atexit.register(fail)
atexit.register(print, "registered last")
print("at work")
{ending}
"""


@pytest.fixture
def ended():
    """Return a function that runs the program with this end and returns exit code, output and errors."""

    def run(ending: str) -> tuple[int, list[str], str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(ending=ending)], capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def test_exit_handlers_run_in_reverse_order_and_a_failing_one_does_not_stop_the_others(ended):
    code, said, complaint = ended("exit_process(3)")
    assert code == 3
    assert said == ["at work", "registered last", "registered first"]
    assert "a handler fails" in complaint


def test_an_exit_handler_that_never_returns_is_abandoned_after_a_timeout(ended):
    code, said, complaint = ended("atexit.register(time.sleep, 60); exit_process(3, seconds=0.2)")
    assert (code, said) == (3, ["at work"])
    assert "threads and exit handlers took more than 0.2 s" in complaint


def test_exit_handlers_run_from_another_thread_if_the_main_thread_is_stuck(ended):
    code, said, complaint = ended("threading.Thread(target=exit_process, args=(3,)).start(); time.sleep(60)")
    assert (code, said) == (3, ["at work", "registered last", "registered first"])
    assert "a handler fails" in complaint


def test_thread_pools_finish_before_exit_handlers_run(ended):
    pool = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.3), print('profile written')))\n"
        "threading.Thread(target=lambda: (time.sleep(0.4), print('thread ended'))).start()\n"
    )
    code, said, _ = ended(f"{pool}exit_process(3)")
    assert code == 3
    assert said == ["at work", "profile written", "thread ended", "registered last", "registered first"]
