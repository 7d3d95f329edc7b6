"""The outcome of a run: from its status file where its last process wrote it, else from that process's exit code."""

import pytest

from finetune.commands.sweep.outcome import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    PRUNED,
    STOPPED,
    WAITING,
    RecordedRun,
    outcome_of,
)

STARTED = 100.0


def status(state, *, time=110.0, error_type=None):
    error = {"type": error_type, "message": "it broke"} if error_type else None
    return {"state": state, "time": time, "error": error, "reason": "signal SIGTERM", "step": 4, "num_steps": 8}


@pytest.mark.parametrize(
    ("written", "code", "state", "message"),
    [
        ({}, None, WAITING, ""),
        (status("finished"), 0, FINISHED, ""),
        (status("finished"), None, FINISHED, ""),  # the sweep was killed before it recorded the end
        (status("stopped"), 143, STOPPED, "signal SIGTERM"),
        (status("failed", error_type="NonFiniteError"), 1, FAILED, "it broke"),
        (status("failed", error_type="LostContact"), 1, INTERRUPTED, "it broke"),
        (status("failed", error_type="DiskError"), 1, INTERRUPTED, "it broke"),
        (status("running"), -9, INTERRUPTED, "killed by signal 9"),
        (status("running"), None, INTERRUPTED, "its process was killed with the sweep"),
        (status("running"), 1, INTERRUPTED, "exited unexpectedly with exit code 1"),
        ({}, 2, FAILED, "a bad key"),
        (status("stopped", time=90.0), 2, FAILED, "a bad key"),  # the status is of an earlier start
        (status("stopped", time=90.0), -9, STOPPED, "signal SIGTERM"),
        ({"state": 7, "time": "x", "error": 3, "step": -1}, 1, FAILED, "a bad key"),
    ],
)
def test_the_outcome_follows_the_status_file_and_the_exit_code(written, code, state, message):
    message_of_log = "a bad key" if code == 2 or 7 in written.values() else None
    record = RecordedRun("a", {}, STARTED if code is not None else None, code, message_of_log)
    outcome = outcome_of(written, record)
    assert (outcome.state, outcome.message) == (state, message)


def test_a_pruned_run_stays_pruned_after_it_stopped():
    assert outcome_of(status("stopped"), RecordedRun("a", {}, STARTED, 0, None, True)).state == PRUNED
