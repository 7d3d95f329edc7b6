"""status.json has the state of a run, and keeps the first rank that ended it alone."""

import json

import pytest

from finetune.errors import CheckpointError, DiskError, NonFiniteError
from finetune.runtime.files import atomic
from finetune.runtime.progress import Progress
from finetune.runtime.supervision.status import (
    FINISHED,
    STOPPED,
    RankExit,
    RankProcess,
    StatusFile,
    exit_from_error,
    previous_end,
)


def status_of(folder, *, rank=0, launch="now", since=0.0, clock=lambda: 100.0) -> StatusFile:
    return StatusFile(
        folder, rank=rank, me=RankProcess(rank, "here", 10 + rank), launch=launch, since=since, clock=clock
    )


def read(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_is_followed_from_its_start_to_its_end(tmp_path):
    now, progress = [100.0], Progress()
    status = status_of(tmp_path, clock=lambda: now[0])
    status.start()
    assert (read(tmp_path)["state"], read(tmp_path)["pid"]) == ("starting", 10)
    status.run(progress, num_steps=8)
    progress.step = 3
    status.refresh()  # too soon
    assert (read(tmp_path)["state"], read(tmp_path)["step"]) == ("running", 0)
    now[0] += 5
    status.refresh()
    assert (read(tmp_path)["step"], read(tmp_path)["num_steps"]) == (3, 8)
    status.checkpoint("runs/a/checkpoints/step-000003")
    status.end(STOPPED, reason="time limit", exit_code=0)
    facts = read(tmp_path)
    assert (facts["state"], facts["reason"], facts["exit_code"], facts["error"]) == ("stopped", "time limit", 0, None)
    assert facts["checkpoint"] == "runs/a/checkpoints/step-000003"
    assert facts["updated"] == "1970-01-01T00:01:45+00:00"


def test_the_first_error_is_kept_regardless_of_later_ones(tmp_path):
    ranks = [status_of(tmp_path, rank=rank) for rank in range(3)]
    ranks[0].start()
    first = ranks[2].claim_exit(exit_from_error(ValueError("broken"), rank=2))
    assert first == RankExit("failed", 2, "ValueError", "ValueError: broken", 1)
    assert ranks[1].claim_exit(exit_from_error(RuntimeError("gloo: closed"), rank=1)) == first
    ranks[0].end(FINISHED, reason="finished", exit_code=0)
    facts = read(tmp_path)
    assert facts["error"] == {"rank": 2, "type": "ValueError", "message": "ValueError: broken"}
    assert (facts["state"], facts["ended_by"], facts["exit_code"]) == ("failed", 2, 1)
    assert str(ranks[0].first()) == "rank 2 failed: ValueError: broken"


def test_an_error_of_an_earlier_launch_is_not_an_error_of_this_one(tmp_path):
    old = status_of(tmp_path, launch="old", clock=lambda: 50.0)
    old.start()
    old.claim_exit(exit_from_error(ValueError("old"), rank=0))
    new = status_of(tmp_path, rank=1, since=90.0)
    assert new.first() is None
    assert status_of(tmp_path, rank=1, launch="old", since=90.0).first() is None  # the same address again
    status_of(tmp_path).start()
    assert new.first() is None
    assert read(tmp_path)["error"] is None


def test_a_launch_that_was_refused_leaves_the_file_of_the_running_one_alone(tmp_path):
    status_of(tmp_path, launch="running").start()
    refused = status_of(tmp_path, rank=1, launch="refused")
    mine = exit_from_error(CheckpointError("mine"), rank=1)
    assert refused.claim_exit(mine) == mine
    assert read(tmp_path)["state"] == "starting"


def test_a_status_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    status = status_of(tmp_path / "run")
    status.start()
    status.run(Progress(), num_steps=3)
    ended = exit_from_error(ValueError(), rank=0)
    assert status.claim_exit(ended) == ended


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (KeyboardInterrupt(), "stopped", 130),
        (CheckpointError("x"), "failed", 2),
        (NonFiniteError("x"), "failed", 1),
        (ZeroDivisionError(), "failed", 1),
    ],
)
def test_each_outcome_has_its_exit_code(error, state, code):
    ended = exit_from_error(error, rank=0)
    assert (ended.state, ended.exit_code) == (state, code)


def test_a_redacted_error_is_still_recognized_as_this_rank_s_own(tmp_path):
    status = status_of(tmp_path)
    status.start()
    own = exit_from_error(ValueError("\x1b 403 at https://h/?token=c0ffee"), rank=0)
    assert status.claim_exit(own) == own
    assert status.claim_exit(own) == own  # as it was read from the file
    assert read(tmp_path)["error"]["message"] == "ValueError: \x1b 403 at https://h/?token=[redacted]"
    assert "\x1b" not in (tmp_path / "status.json").read_text()


@pytest.fixture
def disk_is_full(monkeypatch):
    def fill():
        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(atomic, "write_bytes", refuse)

    return fill


@pytest.mark.parametrize("message", ["the disk is full", "x" * 100_000])
def test_on_a_full_disk_the_end_is_written_into_the_padding_of_the_status_file(tmp_path, disk_is_full, message):
    status = status_of(tmp_path)
    status.start()
    status.run(Progress(3), num_steps=8)
    size = (tmp_path / "status.json").stat().st_size
    disk_is_full()
    status.claim_exit(exit_from_error(DiskError(message), rank=0))
    assert (read(tmp_path)["state"], read(tmp_path)["exit_code"], read(tmp_path)["step"]) == ("failed", 1, 3)
    assert message.startswith(read(tmp_path)["error"]["message"])
    assert (tmp_path / "status.json").stat().st_size == size


DAMAGED = [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"launch": "now", "ended_by": 1}']
DAMAGED += [b'{"launch": "now", "ended_by": 1, "time": "x"}']
DAMAGED += [b'{"launch": "now", "ended_by": [], "time": 99, "error": 3, "state": 1, "exit_code": 0}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_status_file_is_ignored_and_rewritten(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    status = status_of(tmp_path)
    assert status.first() is None
    status.start()
    assert read(tmp_path)["state"] == "starting"


HANGS = RankExit("failed", 1, "Hang", "...", 1)


def test_the_status_of_a_start_has_the_end_of_the_previous_one():
    running = {"state": "running", "num_steps": 9, "step": 4, "time": 5.0, "reason": None, "error": None}
    killed = previous_end(running)
    assert killed == {"state": "failed", "reason": "killed", "step": 4, "time": 5.0}
    error = {"rank": 0, "type": "Hang", "message": "..."}
    assert previous_end({**running, "state": "failed", "error": error})["reason"] == "Hang"
    assert previous_end({**running, "state": "stopped", "reason": "time limit"})["reason"] == "time limit"
    assert previous_end({}) is None
    assert previous_end({"state": "starting", "num_steps": None, "previous": killed}) == killed  # it never trained


def test_facts_added_to_the_status_are_written_even_after_the_end(tmp_path):
    for number, ends in enumerate((lambda status: None, lambda status: status.claim_exit(HANGS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        status = status_of(folder)
        status.start()
        ends(status)
        status.add({"restarts": {"restarts": 1}})
        assert read(folder)["restarts"] == {"restarts": 1}
        assert read(folder)["state"] == ("starting", "failed")[number]
