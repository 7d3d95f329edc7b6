"""`run_ranks` starts ranks on this host as torchrun does, passes signals on, and returns how the ranks have ended."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from finetune.launch.local import run_ranks

ROOT = Path(__file__).parents[2]
PARENT = """
import signal, sys
from finetune.launch.local import run_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started pytest may ignore it
sys.exit(run_ranks(sys.argv[1:], num_processes=2))
"""
WAITING = """
import os, signal, sys, time
from pathlib import Path

def note(number, frame):
    with Path(sys.argv[1], os.environ["RANK"]).open("a") as file:
        file.write(signal.Signals(number).name + " ")
    if number == signal.SIGTERM:
        sys.exit(143)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(60)
"""


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_ranks_have_the_variables_of_torchrun(tmp_path):
    words = [
        program(
            tmp_path, "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"
        )
    ]
    assert run_ranks([*words, str(tmp_path / "rank")], num_processes=2) == 0
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert [second[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["1", "1", "2", "2"]
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (second["MASTER_ADDR"], second["MASTER_PORT"])
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize(("rank", "code"), [(0, 2), (1, 7)])
def test_the_exit_code_of_the_rank_that_fails_is_returned_and_the_others_are_stopped(tmp_path, capfd, rank, code):
    text = f"import os, sys, time; sys.exit({code}) if os.environ['RANK'] == '{rank}' else time.sleep(60)"
    began = time.monotonic()
    assert run_ranks([program(tmp_path, text)], num_processes=2) == code
    assert time.monotonic() - began < 30
    assert capfd.readouterr() == ("", "")  # no log and no traceback of the launcher


def test_a_killed_rank_is_one_message_and_a_code_above_128(tmp_path, capfd):
    text = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert run_ranks([program(tmp_path, text)], num_processes=2) == 137
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: rank 1 (pid ") and "SIGKILL" in lines[0]


def test_signal_handlers_and_environment_are_as_before(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers], dict(os.environ)
    assert run_ranks([program(tmp_path, "pass")], num_processes=2) == 0
    assert ([signal.getsignal(number) for number in numbers], dict(os.environ)) == before


@pytest.fixture
def waiting(tmp_path):
    """A program that waits for signals on two ranks; the pid of the process that has called `run_ranks`."""
    words = [sys.executable, "-c", PARENT, program(tmp_path, WAITING), str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"))
        time.sleep(0.5)  # the parent installs its handlers right after the ranks' start
        yield process
    finally:
        process.kill()
        process.wait()


def is_noted(number: signal.Signals, folder: Path) -> bool:
    return all(number.name in (folder / rank).read_text() for rank in "01")


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_signals_are_passed_on_to_every_rank_once(waiting, tmp_path):
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        waiting.send_signal(number)
        wait_until(partial(is_noted, number, tmp_path))
    assert waiting.wait(timeout=30) == 143
    for rank in "01":
        assert (tmp_path / rank).read_text().split() == ["SIGUSR1", "SIGINT", "SIGTERM"]
