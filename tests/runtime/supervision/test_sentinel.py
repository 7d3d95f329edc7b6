"""Real sentinels of processes that represent runs, all at once; the outcome of a run, and when the command is due."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import psutil
import pytest

from finetune.config.sections import run as section
from finetune.runtime.supervision.on_end import RunSentinel, find_launchers
from finetune.runtime.supervision.sentinel import (
    LEAVE,
    OUTCOMES,
    WAIT,
    EndHook,
    RunEnd,
    append_line,
    command_environment,
    end_of_run,
    next_action,
    run_command,
)
from finetune.runtime.supervision.status import Peer

PATH = {"PATH": os.environ["PATH"]}


def run(command: str, *, seconds: float = 30.0) -> tuple[int, str]:
    lines: list[str] = []
    return run_command(command, environment=PATH, log=lines.append, timeout_seconds=seconds), "\n".join(lines)


def test_an_on_end_command_returns_its_output_and_exit_code():
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


def test_an_on_end_command_that_closes_its_output_is_awaited():
    assert run("exec >&- 2>&-; sleep 0.3; exit 5")[0] == 5


def test_endless_output_of_an_on_end_command_is_truncated():
    code, text = run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert code == 0
    assert len(text) < 1.2e6
    assert text.endswith("(truncated after 1,048,576 of 5,000,000 bytes)")


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
        append_line(tmp_path / name, "text")
    assert not (tmp_path / "elsewhere").exists()
    append_line(tmp_path / "on_end.log", "text")
    assert (tmp_path / "on_end.log").read_text() == "text\n"


def test_the_on_end_command_gets_no_rank_variables():
    variables = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "true", "HOME": "/root", "AWS": "key"}
    environment = command_environment(variables, RunEnd("finished", "", 0), HOOK)
    own = {name: value for name, value in environment.items() if not name.startswith("FINETUNE_")}
    assert own == {"HOME": "/root", "AWS": "key"} and environment["FINETUNE_OUTCOME"] == "finished"


WAIT_SECONDS = 60.0

RUN = """
import json, os, sys, time
from finetune.runtime.supervision.sentinel import EndHook
from finetune.runtime.supervision.on_end import RunSentinel
sentinel = RunSentinel(EndHook(**json.loads(sys.argv[1])))
print(sentinel.start(), flush=True)
exec(sys.argv[2])
"""
"""A run: it starts its sentinel as a rank does, and then executes its second argument."""


@dataclass
class FakeRun:
    """A process that represents a run, with its sentinel."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    sentinel: int

    @property
    def log(self) -> str:
        path = self.folder / "on_end.log"
        return path.read_text() if path.exists() else ""

    def until_over(self) -> str:
        """Wait until the sentinel has ended; return the output of the command."""
        deadline = time.monotonic() + WAIT_SECONDS
        while psutil.pid_exists(self.sentinel) and psutil.Process(self.sentinel).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        assert not list(self.folder.glob(".on_end*"))
        return self.log


def hook_of(folder: Path, **changed) -> dict:
    return {
        "command": 'echo "$FINETUNE_OUTCOME $FINETUNE_REASON"',
        "run_folder": str(folder),
        "when": ["finished", "failed", "idle", "stopped"],
        "restart_seconds": 0.0,
        "idle_after_seconds": 600.0,
        "timeout_seconds": 5.0,
        "log": str(folder / "on_end.log"),
        "host": "here",
        "launch": "here:1",
        **changed,
    }


@pytest.fixture
def begin(tmp_path: Path) -> Iterator:
    runs: list[FakeRun] = []

    def start(name: str, life: str, **changed) -> FakeRun:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", RUN, json.dumps(hook_of(folder, **changed)), life]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        runs.append(FakeRun(folder, process, 0))
        return runs[-1]

    def all_started() -> None:
        for run in runs:
            run.sentinel = run.sentinel or int(run.process.stdout.readline())

    start.all_started = all_started
    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.process.stdout.close()
        if psutil.pid_exists(run.sentinel):
            os.kill(run.sentinel, signal.SIGKILL)


FINISHED = "sentinel.end_training('finished', reason='finished'); sentinel.exit(0)"
KILL = "sentinel.begin_training(); os.kill(os.getpid(), 9)"


def test_the_on_end_command_runs_for_every_outcome(begin):
    finished = begin("finished", FINISHED)
    killed = begin("killed", KILL)
    typo = begin("typo", "sys.exit(2)")  # before training
    no_need = begin("no need", "sentinel.call_off(); time.sleep(0.1)")
    lives_on = begin("lives on", "time.sleep(600)", idle_after_seconds=1.5)
    called_off = begin("called off", "time.sleep(600)")
    full = begin("full", KILL, log="/dev/full", command='touch "$FINETUNE_RUN_FOLDER/done"; kill $$; touch deaf')
    begin.all_started()
    os.kill(called_off.sentinel, signal.SIGTERM)
    assert "finished finished" in finished.until_over()
    assert "failed killed" in killed.until_over()
    assert typo.until_over() == no_need.until_over() == ""
    assert "idle no progress" in lives_on.until_over()
    assert lives_on.process.poll() is None  # the command decides what becomes of it
    assert "called off by SIGTERM" in called_off.until_over()
    full.until_over()
    assert (full.folder / "done").exists()
    assert not Path("deaf").exists()


def test_a_launcher_that_lives_may_start_the_run_again(begin):
    launcher = subprocess.Popen(["sleep", "600"])
    created = psutil.Process(launcher.pid).create_time()
    attempt = begin("launched", "sentinel._send = None", launchers=[[launcher.pid, created]])
    begin.all_started()
    attempt.process.wait()
    launcher.kill()
    launcher.wait()
    attempt.until_over()


def test_a_restart_replaces_the_old_sentinel_and_knows_that_the_run_has_trained(begin):
    first = begin("again", KILL, restart_seconds=600.0)
    begin.all_started()
    first.process.wait()
    second = begin("again", "sys.exit(1)", launch="here:2")  # fails before its own first step
    begin.all_started()
    second.process.wait()
    assert "failed killed" in second.until_over()
    first.until_over()
    assert first.log.count("failed killed") == 1


def test_no_sentinel_is_started_without_a_hook():
    sentinel = RunSentinel(None)
    assert sentinel.start() is None
    sentinel.watch([Peer(0, "here", 1)], host="here")
    sentinel.begin_training()
    sentinel.call_off()
    assert sentinel.exit(3) == 3


def test_a_process_without_a_launcher_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert find_launchers(psutil.Process()) == []


HOOK = EndHook(
    command="true",
    when=("finished", "failed", "idle"),
    restart_seconds=60.0,
    idle_after_seconds=3600.0,
    timeout_seconds=10.0,
    run_folder="/runs/a",
    log="/runs/a/on_end.log",
    host="here",
    launch="here:1",
    processes=((1, 2.0),),
    has_trained=True,
)


def test_the_outcomes_equal_the_choices_of_the_key():
    assert get_args(section.Outcome) == OUTCOMES


def test_a_hook_survives_json():
    assert asdict(EndHook(**json.loads(json.dumps(asdict(HOOK))))) == json.loads(json.dumps(asdict(HOOK)))


def status(state: str, **fields) -> dict:
    return {"launch": "here:1", "state": state, "step": 7, "reason": None, "error": None, "exit_code": None, **fields}


ERROR = {"rank": 1, "type": "NonFiniteError", "message": "$(reboot)"}
ENDS = [
    ({"state": "finished", "reason": "finished", "exit_code": 0}, status("finished"), ("finished", "finished", 0)),
    (
        {"state": "finished", "reason": "early stopping", "exit_code": 0},
        status("finished"),
        ("finished", "early stopping", 0),
    ),
    # What could not be uploaded is on this machine alone.
    ({"state": "finished", "reason": "finished", "exit_code": 1}, status("finished"), ("failed", "not everything", 1)),
    (None, status("finished", exit_code=0, reason="finished"), ("failed", "killed", 1)),  # while it uploaded
    (
        {"state": "stopped", "reason": "signal SIGTERM", "exit_code": 143},
        status("stopped"),
        ("stopped", "signal SIGTERM", 143),
    ),
    ({"state": "stopped", "reason": "time limit", "exit_code": 0}, status("stopped"), ("stopped", "time limit", 0)),
    ({"state": "stopped", "reason": "signal SIGINT", "exit_code": 130}, {}, ("interrupted", "signal SIGINT", 130)),
    (None, status("stopped", reason="interrupted", exit_code=130), ("interrupted", "interrupted", 130)),
    (
        {"state": "stopped", "reason": "checkpoint failed", "exit_code": 1},
        status("stopped"),
        ("failed", "checkpoint failed", 1),
    ),
    (None, status("failed", error=ERROR, exit_code=1), ("failed", "NonFiniteError", 1)),
    (None, status("running"), ("failed", "killed", 1)),
    (None, {}, ("failed", "killed", 1)),
    (None, status("failed", launch="there:2", error=ERROR, exit_code=1), ("failed", "killed", 1)),
]


@pytest.mark.parametrize(("announced", "facts", "wanted"), ENDS)
def test_the_end_of_a_run_is_read_from_its_announcement_or_status(announced, facts, wanted):
    end = end_of_run(announced, facts, hook=HOOK)
    assert (end.outcome, end.exit_code) == (wanted[0], wanted[2])
    assert end.reason.startswith(wanted[1])


def test_before_training_a_failure_is_a_failed_start():
    hook = replace(HOOK, has_trained=False)
    assert end_of_run(None, status("failed", error=ERROR, exit_code=2), hook=hook).outcome == "failed_start"
    assert end_of_run(None, status("starting"), hook=hook).outcome == "failed_start"


@pytest.mark.parametrize("hostile", [{"state": ["x"], "step": "9", "exit_code": True, "error": "no"}, {"error": 5}])
def test_a_damaged_status_is_a_killed_run(hostile):
    end = end_of_run(None, {"launch": "here:1", **hostile}, hook=HOOK)
    assert (end.outcome, end.step, end.exit_code) == ("failed", 0, 1)


def test_the_reason_passed_to_the_on_end_command_contains_only_plain_text():
    error = {"type": "X'; rm -rf $HOME `id`\n\x1b[31m"}
    end = end_of_run(None, status("failed", error=error, exit_code=1), hook=HOOK)
    assert end.reason == "X rm -rf HOME id31m"
    environment = command_environment({}, end, HOOK)
    assert environment["FINETUNE_REASON"] == end.reason and all("\x00" not in value for value in environment.values())


def test_no_on_end_action_is_due_while_the_run_is_alive_and_progressing():
    """For every combination: a run that is alive and not quiet is waited for."""
    ends = [RunEnd(outcome, "", 1) for outcome in OUTCOMES]
    quiet = (0.0, 3600.0)
    actions = {
        next_action(end, HOOK, is_alive=True, quiet_seconds=seconds, ended_seconds=1e9)
        for seconds, end in product(quiet, ends)
    }
    assert actions == {WAIT}


def test_a_run_without_progress_is_idle_even_if_a_process_is_alive():
    end = RunEnd("failed", "killed", 1)
    action = next_action(end, HOOK, is_alive=True, quiet_seconds=3601.0)
    assert isinstance(action, RunEnd) and action.outcome == "idle"
    assert next_action(end, replace(HOOK, when=("failed",)), is_alive=True, quiet_seconds=1e9) == WAIT


def test_only_a_finished_run_is_not_given_time_to_restart():
    for outcome in ("failed", "stopped", "failed_start", "interrupted"):
        hook, end = replace(HOOK, when=(outcome,)), RunEnd(outcome, "", 1)
        assert next_action(end, hook, is_alive=False, quiet_seconds=0.0, ended_seconds=59.0) == WAIT
        assert next_action(end, hook, is_alive=False, quiet_seconds=0.0, ended_seconds=60.0) == end
    finished = RunEnd("finished", "", 0)
    assert next_action(finished, HOOK, is_alive=False, quiet_seconds=0.0) == finished


def test_an_on_end_outcome_that_is_not_listed_runs_no_command():
    interrupted = RunEnd("interrupted", "", 130)
    assert next_action(interrupted, HOOK, is_alive=False, quiet_seconds=0.0) == LEAVE
