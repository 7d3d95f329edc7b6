"""How a run stands: from its status file where that is of its last process, else from how the process ended."""

import pytest

from finetune.commands.sweep.state.outcome import FAILED, FINISHED, INTERRUPTED, PRUNED, STOPPED, WAITING, outcome_of
from finetune.commands.sweep.state.record import RecordedRun

STARTED = 100.0


def status(state, *, time=110.0, kind=None):
    error = {"type": kind, "message": "it broke"} if kind else None
    return {"state": state, "time": time, "error": error, "reason": "signal SIGTERM", "step": 4, "num_steps": 8}


@pytest.mark.parametrize(
    ("found", "code", "state", "message"),
    [
        ({}, None, WAITING, ""),
        (status("finished"), 0, FINISHED, ""),
        (status("finished"), None, FINISHED, ""),  # the sweep was killed before it learnt of the end
        (status("stopped"), 143, STOPPED, "signal SIGTERM"),
        (status("failed", kind="NonFiniteError"), 1, FAILED, "it broke"),
        (status("failed", kind="LostContact"), 1, INTERRUPTED, "it broke"),
        (status("failed", kind="DiskError"), 1, INTERRUPTED, "it broke"),
        (status("running"), -9, INTERRUPTED, "killed by signal 9"),
        (status("running"), None, INTERRUPTED, "its process was killed with the sweep"),
        (status("running"), 1, INTERRUPTED, "ended without a word, exit code 1"),
        ({}, 2, FAILED, "a bad key"),
        (status("stopped", time=90.0), 2, FAILED, "a bad key"),  # the status is of an earlier start
        (status("stopped", time=90.0), -9, STOPPED, "signal SIGTERM"),
        ({"state": 7, "time": "x", "error": 3, "step": -1}, 1, FAILED, "a bad key"),
    ],
)
def test_a_run_stands_as_its_files_say(found, code, state, message):
    record = RecordedRun(
        "a", {}, STARTED if code is not None else None, code, "a bad key" if code == 2 or 7 in found.values() else None
    )
    outcome = outcome_of(found, record)
    assert (outcome.state, outcome.message) == (state, message)


def test_a_pruned_run_stays_pruned():
    assert outcome_of(status("stopped"), RecordedRun("a", {}, STARTED, 0, None, True)).state == PRUNED
