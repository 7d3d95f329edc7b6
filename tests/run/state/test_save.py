"""What a run is told of its checkpoints, and when it stops because of them."""

import threading
from unittest.mock import patch

import pytest
import torch

from finetune.checkpoint.write import saver
from finetune.errors import CheckpointError, NonFiniteError
from finetune.report.events import CheckpointSaved, Warned
from finetune.run.state.save import ReportingSaver
from finetune.runtime.progress import Progress
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.faults import VARIABLE
from tests.checkpoint.small_run import Run

BOTH_WAYS = pytest.mark.parametrize("asynchronous", [True, False])
FULL = "save.write step=2 do=no_space"


class Saved:
    """A small run, how it saves itself, and what it has reported."""

    def __init__(self, folder, **section):
        self.run = Run(folder, **section)
        self.events, self.paths = [], []
        self.save = ReportingSaver(self.run.checkpointer, self.events.append, self.paths.append)

    def at(self, step):
        self.run.train(range(step - 1, step), save=False)
        self.save(Progress(step=step))

    def waited(self):
        """Wait as the loop never does, so that what is written behind has ended by now."""
        self.run.checkpointer.saver.wait()
        return self


@pytest.fixture
def full_disk(monkeypatch):
    """The disk is full at step 2, for all three tries."""
    monkeypatch.setattr(saver, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setenv(VARIABLE, "; ".join([FULL] * 3))
    heartbeat._faults.cache_clear()


def steps(folder):
    return [path.name for path in sorted(folder.glob("*"))]


@BOTH_WAYS
def test_each_checkpoint_is_reported_once_when_it_is_whole(tmp_path, asynchronous):
    saved = Saved(tmp_path / "c", asynchronous=asynchronous, keep_last=3)
    for step in (1, 2, 3):
        saved.at(step)
        saved.save.report_written()
    saved.save.wait_for_writes()
    saved.save.wait_for_writes()  # there is nothing left to wait for
    told = [event for event in saved.events if isinstance(event, CheckpointSaved)]
    assert [event.step for event in told] == [1, 2, 3]
    assert saved.paths == [event.path for event in told] == [str(tmp_path / "c" / f"step-00000{i}") for i in (1, 2, 3)]
    assert all(0 < event.stall_seconds <= event.seconds for event in told)
    assert not saved.save.has_failed


def test_the_next_save_waits_for_the_one_before(tmp_path):
    saved, may_write = Saved(tmp_path / "c"), threading.Event()
    with patch(
        "finetune.checkpoint.write.saver.prune", side_effect=lambda *_, **__: [] if may_write.wait(60) else ["late"]
    ):
        saved.at(1)
        saved.save.report_written()
        assert saved.events == []
        threading.Timer(0.05, may_write.set).start()
        saved.at(2)
        assert [event.step for event in saved.events] == [1]
        saved.save.wait_for_writes()
    assert [event.step for event in saved.events] == [1, 2]


def test_a_failed_background_write_ends_the_run_at_the_next_step(tmp_path, full_disk):
    saved = Saved(tmp_path / "c")
    saved.at(1)
    saved.at(2)
    assert saved.waited().save.has_failed
    saved.save.report_written()
    warnings = [event.message for event in saved.events if isinstance(event, Warned)]
    assert len(warnings) == 2 and all("retrying in" in message for message in warnings)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written, 3 times"):
        saved.save.wait_for_writes()
    assert steps(tmp_path / "c") == ["step-000001"]


@BOTH_WAYS
def test_a_failed_background_write_is_also_raised_by_the_next_save(tmp_path, full_disk, asynchronous):
    saved = Saved(tmp_path / "c", asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="step 2 could not be written, 3 times"):
        for step in (1, 2, 3):
            saved.at(step)


@BOTH_WAYS
def test_training_continues_with_a_warning_after_a_failed_save_if_configured(tmp_path, full_disk, asynchronous):
    saved = Saved(tmp_path / "c", asynchronous=asynchronous, on_failure="continue")
    for step in (1, 2, 3):
        saved.at(step)
        assert not saved.waited().save.has_failed
        saved.save.report_written()
    saved.save.wait_for_writes()
    assert [event.step for event in saved.events] == [1, 2, 2, 2, 3]
    kinds = [CheckpointSaved, Warned, Warned, Warned, CheckpointSaved]
    assert [type(event) for event in saved.events] == kinds
    assert "Training continues, and the next save that is due tries again." in saved.events[3].message
    assert steps(tmp_path / "c") == ["step-000001", "step-000003"]


@BOTH_WAYS
def test_a_non_finite_state_ends_the_run_regardless_of_the_failure_setting(tmp_path, asynchronous):
    saved = Saved(tmp_path / "c", asynchronous=asynchronous, on_failure="continue")
    saved.at(1)
    with torch.no_grad():
        saved.run.model[0].bias[2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"0\.bias is not finite.*step-000001"):
        saved.save(Progress(step=2))
        assert saved.waited().save.has_failed
        saved.save.wait_for_writes()
    assert steps(tmp_path / "c") == ["step-000001"]
