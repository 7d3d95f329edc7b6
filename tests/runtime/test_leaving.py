"""A rank ends without the interpreter's teardown, and still does what was registered with atexit."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from finetune.runtime.leaving import leave_process

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
    """Return a function that runs the program with this ending: exit code, what it printed, what it complained of."""

    def run(ending: str) -> tuple[int, list[str], str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(ending=ending)], capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def test_handlers_run_last_first_and_one_that_fails_keeps_no_other(ended):
    code, said, complaint = ended("leave_process(3)")
    assert code == 3
    assert said == ["at work", "registered last", "registered first"]
    assert "a handler fails" in complaint


def test_a_handler_that_never_ends_is_left_after_a_while(ended):
    code, said, complaint = ended("atexit.register(time.sleep, 60); leave_process(3, seconds=0.2)")
    assert (code, said) == (3, ["at work"])
    assert "what was registered with atexit took more than 0.2 s" in complaint


def test_another_thread_ends_the_process_at_once(ended):
    code, said, _ = ended("threading.Thread(target=leave_process, args=(3,)).start(); time.sleep(60)")
    assert (code, said) == (3, ["at work"])
