"""Every end of a run, and what the scheduler is to do then."""

import itertools

import pytest

from finetune.launch.jobs.decision import AGAIN, Decision, RunEnd, decide, read_run_end


def decided(
    ended: int | None, *, step: int = 10, last: Decision | None = None, restarts: int = 3, code: int = 1
) -> int:
    return decide(RunEnd(ended), code=code, step=step, last=last, max_restarts=restarts).exit_code


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(0, 0), (2, 2), (130, 130), (143, AGAIN), (129, AGAIN), (1, AGAIN), (None, AGAIN), (-9, AGAIN), (137, AGAIN)],
)
def test_the_end_that_the_run_wrote_down_counts_and_not_the_launchers(ended, expected):
    for code in (0, 1, 137):
        assert decided(ended, code=code) == expected


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (1, AGAIN), (143, AGAIN), (130, 130), (127, AGAIN)])
def test_without_a_status_of_this_attempt_the_exit_code_of_the_launcher_counts(code, expected):
    decision = decide(None, code=code, step=0, last=None, max_restarts=3)
    assert decision.exit_code == expected and f"exit code {code}" in decision.reason


@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("ended", [1, 143, None])
def test_a_job_that_gains_nothing_is_given_up(restarts, ended):
    last, codes = None, []
    for _ in range(restarts + 1):
        last = decide(RunEnd(ended), code=1, step=0, last=last, max_restarts=restarts)
        codes.append(last.exit_code)
    assert codes == [AGAIN] * restarts + [1]
    assert f"{restarts + 1} attempts in a row" in last.reason


def test_a_step_gained_clears_the_count_however_often_it_was_preempted():
    last = None
    for number in range(1, 50):
        last = decide(RunEnd(143, "signal SIGTERM"), code=1, step=number, last=last, max_restarts=0)
        assert (last.exit_code, last.num_failures, last.step) == (AGAIN, 0, number)


def test_a_job_is_never_restarted_in_a_row_more_often_than_allowed():
    """All sequences of 5 ends, with and without a step gained."""
    num_sequences = 0
    for sequence in itertools.product([(1, 0), (143, 0), (None, 0), (1, 1), (143, 1)], repeat=5):
        last, step, without = None, 0, 0
        for ended, gained in sequence:
            step += gained
            without = 0 if gained else without + 1
            last = decide(RunEnd(ended), code=1, step=step, last=last, max_restarts=2)
            assert last.exit_code == (1 if without > 2 else AGAIN), sequence
            if last.exit_code != AGAIN:
                break
        num_sequences += 1
    assert num_sequences == 5**5


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"exit_code": 2, "error": {"message": "no"}, "reason": None}, RunEnd(2, "no")),
        ({"exit_code": 143, "error": None, "reason": "signal SIGTERM"}, RunEnd(143, "signal SIGTERM")),
        ({"exit_code": None, "state": "running"}, RunEnd(None, "running")),
        ({"exit_code": "2"}, None),
        ({"exit_code": True}, None),
        ({"exit_code": 1, "error": "text"}, RunEnd(1, "")),
        ({}, RunEnd(None, "")),
    ],
)
def test_a_status_is_read_with_care(facts, expected):
    assert read_run_end(facts) == expected
