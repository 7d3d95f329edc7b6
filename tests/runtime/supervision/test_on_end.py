"""The command of `run.on_end`: how the end of a run is described to it, that it runs once, and how it fails."""

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from finetune.runtime.progress import Progress
from finetune.runtime.supervision.on_end import (
    CANNOT_RUN,
    TIMED_OUT,
    EndCommand,
    RunEnd,
    command_environment,
    end_of_run,
    run_command,
    run_if_pending,
)
from finetune.runtime.supervision.status import FINISHED, RankProcess, StatusFile, exit_from_error, read_status

END = RunEnd("failed", "Hang", 1, 7)
RECORD = 'echo "$FINETUNE_OUTCOME $FINETUNE_REASON $FINETUNE_EXIT_CODE $FINETUNE_STEP" >> "$FINETUNE_RUN_FOLDER/ends"'


@pytest.fixture
def status(tmp_path: Path) -> StatusFile:
    file = StatusFile(tmp_path, rank=0, me=RankProcess(0, "here", 10), launch="now", since=0.0)
    file.start()
    return file


def ends(folder: Path) -> list[str]:
    path = folder / "ends"
    return path.read_text().splitlines() if path.exists() else []


ERROR = {"rank": 1, "type": "NonFiniteError", "message": "$(reboot)"}
ENDS = [
    ({"state": "finished", "reason": "finished", "exit_code": 0}, 0, ("finished", "finished", 0)),
    ({"state": "finished", "reason": "early stopping", "exit_code": 0}, 0, ("finished", "early stopping", 0)),
    ({"state": "finished", "reason": "finished", "exit_code": 0}, 1, ("failed", "upload failed", 1)),
    ({"state": "stopped", "reason": "signal SIGTERM", "exit_code": 143}, 143, ("stopped", "signal SIGTERM", 143)),
    ({"state": "stopped", "reason": "time limit", "exit_code": 0}, 0, ("stopped", "time limit", 0)),
    ({"state": "stopped", "reason": "signal SIGINT", "exit_code": 130}, 130, ("interrupted", "signal SIGINT", 130)),
    ({"state": "stopped", "reason": "interrupted", "exit_code": 130}, 130, ("interrupted", "interrupted", 130)),
    ({"state": "stopped", "reason": "checkpoint failed", "exit_code": 1}, 1, ("failed", "checkpoint failed", 1)),
    ({"state": "failed", "error": ERROR, "exit_code": 2}, 1, ("failed", "NonFiniteError", 2)),
    ({"state": "failed", "error": ERROR, "exit_code": 2, "num_steps": None}, 2, ("failed_start", "NonFiniteError", 2)),
    ({"state": "running"}, 137, ("failed", "killed", 137)),
    ({"state": "running"}, 0, ("failed", "killed", 1)),
    ({"state": "starting", "num_steps": None}, 137, ("failed_start", "killed", 137)),
]


@pytest.mark.parametrize(("facts", "exit_code", "expected"), ENDS)
def test_the_end_of_a_run_is_read_from_its_status(facts, exit_code, expected):
    defaults = {"step": 7, "num_steps": 8, "reason": None, "error": None, "exit_code": None}
    end = end_of_run(defaults | facts, exit_code=exit_code)
    assert (end.outcome, end.reason, end.exit_code, end.step) == (*expected, 7)


def test_a_missing_status_file_is_a_killed_run(tmp_path):
    assert end_of_run(read_status(tmp_path), exit_code=1) == RunEnd("failed_start", "killed", 1)


def test_the_command_gets_the_end_and_no_rank_variables():
    variables = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "true", "HOME": "/root", "ROLE": "me"}
    environment = command_environment(
        variables | {"FINETUNE_ATTEMPT": "3"}, END, folder=Path("/runs/a"), url="s3://b/a"
    )
    assert environment == {
        "HOME": "/root",
        "ROLE": "me",
        "FINETUNE_OUTCOME": "failed",
        "FINETUNE_REASON": "Hang",
        "FINETUNE_EXIT_CODE": "1",
        "FINETUNE_STEP": "7",
        "FINETUNE_RUN_FOLDER": "/runs/a",
        "FINETUNE_RUN_URL": "s3://b/a",
        "FINETUNE_STATUS_FILE": "/runs/a/status.json",
    }


def test_the_output_is_that_of_the_run_and_a_failure_is_a_warning(tmp_path, capfd):
    assert run_command("echo out; echo err >&2; exit 3", END, folder=tmp_path) == 3
    out, err = capfd.readouterr()
    assert out == "out\n"
    first, second, third = err.splitlines()
    assert first.startswith("run.on_end: failed (Hang, step 7, exit code 1)") and "exit 3" in first
    assert second == "err" and "warning" in third and "exit code 3" in third


def test_secrets_and_control_characters_of_the_command_are_not_logged(tmp_path, capfd):
    token = "hf_" + "a1B2" * 8
    run_command(f"true {token} '\033[31m'", END, folder=tmp_path)
    assert "[redacted] '\\x1b[31m'" in capfd.readouterr().err


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path, capfd):
    command = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    assert run_command(command, END, folder=tmp_path, timeout_seconds=0.5) == TIMED_OUT
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert "was killed" in capfd.readouterr().err


def test_the_command_runs_once_whichever_thread_ends_the_process_first(tmp_path, status):
    command = EndCommand(f"sleep 0.3; {RECORD}", status, folder=tmp_path)
    assert read_status(tmp_path)["on_end"] is True
    status.run(Progress(), num_steps=8)
    status.end(FINISHED, reason="finished", exit_code=0)
    threads = [threading.Thread(target=command.run, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:  # both wait for the command
        thread.join()
        assert ends(tmp_path) == ["finished finished 0 0"]
    assert read_status(tmp_path)["on_end"] is False
    run_if_pending(RECORD, tmp_path, since=0.0, exit_code=0)
    assert len(ends(tmp_path)) == 1


def test_a_run_that_is_over_already_runs_no_command(tmp_path, status):
    command = EndCommand(RECORD, status, folder=tmp_path)
    command.call_off()
    command.run(0)
    run_if_pending(RECORD, tmp_path, since=0.0, exit_code=0)
    assert ends(tmp_path) == []


def test_a_command_that_cannot_be_run_fails_without_raising(tmp_path, capfd):
    assert run_command("a\0b", END, folder=tmp_path) == CANNOT_RUN
    assert "warning" in capfd.readouterr().err


def test_without_a_command_the_status_has_no_key_for_it(tmp_path, status):
    EndCommand(None, status, folder=tmp_path).run(0)
    assert "on_end" not in read_status(tmp_path)


def test_the_launcher_runs_the_command_of_a_rank_that_was_killed(tmp_path, status):
    EndCommand(RECORD, status, folder=tmp_path)
    status.run(Progress(), num_steps=8)
    run_if_pending(RECORD, tmp_path, since=time.time() + 60, exit_code=1)  # of an earlier start
    assert ends(tmp_path) == []
    run_if_pending(RECORD, tmp_path, since=0.0, exit_code=137)
    assert ends(tmp_path) == ["failed killed 137 0"]


@pytest.mark.parametrize(
    "variables", [{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}, {"FINETUNE_ATTEMPT": "2"}]
)
def test_a_launcher_that_may_start_the_run_again_is_left_the_command(tmp_path, status, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    command = EndCommand(RECORD, status, folder=tmp_path)
    status.claim_exit(exit_from_error(ValueError("broken"), rank=0))
    command.run(1)
    assert ends(tmp_path) == [] and read_status(tmp_path)["on_end"] is True
    run_if_pending(RECORD, tmp_path, since=0.0, exit_code=1)
    assert ends(tmp_path) == ["failed_start ValueError 1 0"]
