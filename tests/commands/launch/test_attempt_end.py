"""`finetune launch next`: what this attempt wrote counts; failures are counted over attempts, hosts and machines."""

import itertools
import json
from pathlib import Path

import pytest

from finetune.commands.launch.attempt_end import (
    AGAIN,
    RECORD,
    AttemptEnd,
    Decision,
    decide_restart,
    newest_step,
    print_decision,
    read_end,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    (folder / "checkpoints" / ".staging-step-000020").mkdir()
    return folder


def write_status(run: Path, *, time: float, exit_code: int | None, **facts: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    content = {"time": time, "exit_code": exit_code, "reason": None, "error": None, **facts}
    (run / "status.json").write_text(json.dumps(content))


def run_next(run: Path | str, *, code: int = 1, restarts: int = 3, machine_rank: int = 0, **others: object) -> int:
    moments = iter(range(2000, 3000))
    return print_decision(
        str(run),
        since=1000.0,
        code=code,
        max_restarts=restarts,
        machine_rank=machine_rank,
        clock=lambda: float(next(moments)),
        sleep=lambda seconds: None,
        **others,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (2, 2), (143, AGAIN), (1, AGAIN), (None, AGAIN)])
def test_the_status_of_this_attempt_counts(run, exit_code, expected):
    write_status(run, time=1500.0, exit_code=exit_code)
    assert run_next(run) == expected


def test_the_status_of_an_earlier_attempt_does_not(run, capsys):
    write_status(run, time=999.0, exit_code=0)
    assert run_next(run, code=1) == AGAIN
    assert "the launcher ended with exit code 1" in capsys.readouterr().out


def test_failures_are_counted_until_a_step_is_gained(run, capsys):
    codes = []
    for _ in range(3):
        write_status(run, time=1500.0, exit_code=1, error={"message": "the GPU fell off"})
        codes.append(run_next(run, restarts=1))
    assert codes == [AGAIN, AGAIN, 1]  # the first one had gained 10 steps
    (run / "checkpoints" / "step-000020").mkdir()
    assert run_next(run, restarts=1) == AGAIN
    assert "from step 20: failed (the GPU fell off)" in capsys.readouterr().out


def test_another_host_waits_for_the_decision_of_the_first(run, capsys):
    assert run_next(run, machine_rank=1) == AGAIN and "host 0 has not decided" in capsys.readouterr().out
    write_status(run, time=1500.0, exit_code=2)
    assert run_next(run) == 2
    assert run_next(run, machine_rank=1) == 2
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps({**record, "time": 900.0}))
    assert run_next(run, machine_rank=1) == AGAIN  # that was an earlier attempt's


def test_a_damaged_restart_record_is_ignored(run):
    for content in ("", "[1]", '{"time": 1, "decision": {"exit_code": "x"}}', "\0"):
        (run / RECORD).write_text(content)
        assert run_next(run, restarts=0) == AGAIN


def test_the_record_of_a_run_at_a_url_is_there_for_a_new_machine(tmp_path):
    url = f"memory://bucket/{tmp_path.name}"
    codes = []
    for machine in range(3):
        stage = tmp_path / f"machine-{machine}"
        write_status(stage, time=1500.0, exit_code=1)
        codes.append(run_next(url, restarts=1, local_folder=stage))
    assert codes == [AGAIN, 1, 1]
    assert run_next(url, machine_rank=1, local_folder=tmp_path / "another") == 1


def test_a_disk_that_takes_nothing_does_not_change_the_decision(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_next(tmp_path / "file", code=1) == AGAIN
    assert "warning: the decision cannot be recorded" in capsys.readouterr().out


def test_only_whole_checkpoints_count(run):
    assert newest_step(run) == 10 and newest_step(run / "nowhere") == 0


def decided(
    ended: int | None, *, step: int = 10, last: Decision | None = None, restarts: int = 3, code: int = 1
) -> int:
    return decide_restart(AttemptEnd(ended), code=code, step=step, last=last, max_restarts=restarts).exit_code


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(0, 0), (2, 2), (130, 130), (143, AGAIN), (129, AGAIN), (1, AGAIN), (None, AGAIN), (-9, AGAIN), (137, AGAIN)],
)
def test_the_end_that_the_run_wrote_down_counts_and_not_the_launchers(ended, expected):
    for code in (0, 1, 137):
        assert decided(ended, code=code) == expected


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (1, AGAIN), (143, AGAIN), (130, 130), (127, AGAIN)])
def test_without_a_status_of_this_attempt_the_exit_code_of_the_launcher_counts(code, expected):
    decision = decide_restart(None, code=code, step=0, last=None, max_restarts=3)
    assert decision.exit_code == expected and f"exit code {code}" in decision.reason


def test_a_job_is_never_restarted_in_a_row_more_often_than_allowed():
    """All sequences of 5 ends, with and without a step gained."""
    num_sequences = 0
    for sequence in itertools.product([(1, 0), (143, 0), (None, 0), (1, 1), (143, 1)], repeat=5):
        last, step, without = None, 0, 0
        for ended, gained in sequence:
            step += gained
            without = 0 if gained else without + 1
            last = decide_restart(AttemptEnd(ended), code=1, step=step, last=last, max_restarts=2)
            assert last.exit_code == (1 if without > 2 else AGAIN), sequence
            if last.exit_code != AGAIN:
                break
        num_sequences += 1
    assert num_sequences == 5**5


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"exit_code": 2, "error": {"message": "no"}, "reason": None}, AttemptEnd(2, "no")),
        ({"exit_code": 143, "error": None, "reason": "signal SIGTERM"}, AttemptEnd(143, "signal SIGTERM")),
        ({"exit_code": None, "state": "running"}, AttemptEnd(None, "")),
        ({"exit_code": "2"}, None),
        ({"exit_code": True}, None),
        ({"exit_code": 1, "error": "text"}, AttemptEnd(1, "")),
        ({}, AttemptEnd(None, "")),
        ({"time": "x"}, None),
    ],
)
def test_a_status_is_read_with_care(tmp_path, facts, expected):
    (tmp_path / "status.json").write_text(json.dumps({"time": 1500.0, **facts}))
    assert read_end(tmp_path, since=1000.0) == expected
    assert read_end(tmp_path, since=2000.0) is None
