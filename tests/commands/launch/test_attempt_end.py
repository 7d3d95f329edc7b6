"""`finetune launch next`: what this attempt wrote counts; failures are counted over attempts, hosts and machines."""

import json
from pathlib import Path

import pytest

from finetune.commands.launch.attempt_end import RECORD, newest_step, print_decision
from finetune.launch.jobs.decision import AGAIN


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


def decide(run: Path | str, *, code: int = 1, restarts: int = 3, machine_rank: int = 0, **others: object) -> int:
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
    assert decide(run) == expected


def test_the_status_of_an_earlier_attempt_does_not(run, capsys):
    write_status(run, time=999.0, exit_code=0)
    assert decide(run, code=1) == AGAIN
    assert "the launcher ended with exit code 1" in capsys.readouterr().out


def test_a_damaged_or_missing_status_is_ignored(run):
    for content in ("", "{", "[]", '{"time": "x"}', '{"time": 1500.0, "exit_code": "no"}'):
        (run / "status.json").write_text(content)
        assert decide(run, code=2) == 2
    assert decide(run / "nowhere", code=2) == 2


def test_failures_are_counted_until_a_step_is_gained(run, capsys):
    codes = []
    for _ in range(3):
        write_status(run, time=1500.0, exit_code=1, error={"message": "the GPU fell off"})
        codes.append(decide(run, restarts=1))
    assert codes == [AGAIN, AGAIN, 1]  # the first one had gained 10 steps
    (run / "checkpoints" / "step-000020").mkdir()
    assert decide(run, restarts=1) == AGAIN
    assert "from step 20: failed (the GPU fell off)" in capsys.readouterr().out


def test_another_host_waits_for_the_decision_of_the_first(run, capsys):
    assert decide(run, machine_rank=1) == AGAIN and "host 0 has not decided" in capsys.readouterr().out
    write_status(run, time=1500.0, exit_code=2)
    assert decide(run) == 2
    assert decide(run, machine_rank=1) == 2
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps({**record, "time": 900.0}))
    assert decide(run, machine_rank=1) == AGAIN  # that was an earlier attempt's


def test_a_damaged_restart_record_is_ignored(run):
    for content in ("", "[1]", '{"time": 1, "decision": {"exit_code": "x"}}', "\0"):
        (run / RECORD).write_text(content)
        assert decide(run, restarts=0) == AGAIN


def test_the_record_of_a_run_at_a_url_is_there_for_a_new_machine(tmp_path):
    url = f"memory://bucket/{tmp_path.name}"
    codes = []
    for machine in range(3):
        stage = tmp_path / f"machine-{machine}"
        write_status(stage, time=1500.0, exit_code=1)
        codes.append(decide(url, restarts=1, local_folder=stage))
    assert codes == [AGAIN, 1, 1]
    assert decide(url, machine_rank=1, local_folder=tmp_path / "another") == 1


def test_a_disk_that_takes_nothing_does_not_change_the_decision(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert decide(tmp_path / "file", code=1) == AGAIN
    assert "warning: the decision cannot be recorded" in capsys.readouterr().out


def test_only_whole_checkpoints_count(run):
    assert newest_step(run) == 10 and newest_step(run / "nowhere") == 0
