"""The user's command: its output, its time limit, and its environment."""

import os
import time
from pathlib import Path

import psutil
import pytest

from finetune.runtime.supervision.on_end.command import EndLog, command_environment, run_command

PATH = {"PATH": os.environ["PATH"]}


def run(command: str, *, seconds: float = 30.0) -> tuple[int, str]:
    lines: list[str] = []
    return run_command(command, environment=PATH, log=lines.append, timeout_seconds=seconds), "\n".join(lines)


def test_output_and_exit_code_of_a_command():
    assert run("echo out; echo err >&2; exit 3") == (3, "out\nerr")
    assert run("printf 'no end of line'") == (0, "no end of line")
    assert run("not-a-command-at-all")[0] == 127


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path):
    pid = tmp_path / "pid"
    code, _ = run(f"sleep 600 & echo $! > {pid}; wait", seconds=0.3)
    assert code == 124
    child = int(pid.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline


def test_processes_left_in_the_background_are_not_waited_for():
    started = time.monotonic()
    assert run("sleep 5 & echo done") == (0, "done")
    assert time.monotonic() - started < 4


def test_a_command_that_closes_its_output_is_waited_for():
    assert run("exec >&- 2>&-; sleep 0.3; exit 5")[0] == 5


def test_output_without_end_is_cut():
    code, text = run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert code == 0
    assert len(text) < 1.2e6
    assert text.endswith("(cut after 1,048,576 of 5,000,000 bytes)")


def test_secrets_and_control_characters_are_not_logged():
    token = "hf_" + "a1B2" * 8
    code, text = run(f"printf 'a {token} \\033[31m\\n'")
    assert (code, text) == (0, "a [redacted] \\x1b[31m")


@pytest.mark.parametrize("command", ["echo '", "\ud800", "a\x00b"])
def test_an_invalid_on_end_command_fails_without_raising(command: str):
    assert run(command)[0] != 0


def test_an_unwritable_on_end_log_does_not_stop_the_command(tmp_path: Path):
    (tmp_path / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link", "none/on_end.log", "."):
        EndLog(tmp_path / name)("text")
    assert not (tmp_path / "elsewhere").exists()
    EndLog(tmp_path / "on_end.log")("text")
    assert (tmp_path / "on_end.log").read_text() == "text\n"


def test_the_on_end_command_gets_no_rank_variables():
    variables = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "true", "HOME": "/root", "AWS": "key"}
    facts = {"FINETUNE_OUTCOME": "finished"}
    assert command_environment(variables, facts) == {"HOME": "/root", "AWS": "key", **facts}
