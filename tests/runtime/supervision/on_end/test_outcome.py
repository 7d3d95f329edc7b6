"""The outcome of a run, from its announcement, its status file or its disappearance; and when the command is due."""

import json
from dataclasses import asdict, replace
from itertools import product
from typing import get_args

import pytest

from finetune.config.sections import run as section
from finetune.runtime.supervision.on_end.outcome import (
    LEAVE,
    OUTCOMES,
    WAIT,
    EndHook,
    RunEnd,
    describe_end,
    end_of_run,
    next_action,
)

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
    (
        {"state": "stopped", "reason": "signal SIGINT", "exit_code": 130},
        {},
        ("interrupted", "signal SIGINT", 130),
    ),
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
    assert describe_end(end, HOOK)["FINETUNE_REASON"] == end.reason
    assert all("\x00" not in value for value in describe_end(end, HOOK).values())


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
