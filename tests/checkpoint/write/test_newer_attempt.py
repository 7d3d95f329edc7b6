"""A process that a newer attempt of a supervised run has replaced makes no checkpoint visible, and deletes none."""

import pytest

from finetune.checkpoint.write import saver
from finetune.checkpoint.write.retention import prune_checkpoints
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError, LostContact
from finetune.runtime.run_folder import mark_attempt
from tests.checkpoint.small_run import Run
from tests.refusals import refused


@pytest.fixture
def attempt_1(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
    for name, value in mark_attempt(tmp_path, 1).items():
        monkeypatch.setenv(name, value)


def visible(folder):
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_replaced_process_writes_and_deletes_nothing(attempt_1, folder, tmp_path, asynchronous):
    run = Run(folder, asynchronous=asynchronous, keep_last=2).train(range(2))
    before = visible(folder)
    assert before == ["step-000001", "step-000002"]
    mark_attempt(tmp_path, 2)
    with refused(CheckpointError, "attempt 2"):
        run.train(range(2, 4))
    assert visible(folder) == before
    with refused(LostContact):
        prune_checkpoints(folder, section=CheckpointSection(keep_last=2), newest=2)


def test_a_save_suspended_before_its_rename_does_not_rename_after_a_newer_attempt_started(
    attempt_1, folder, tmp_path, monkeypatch
):
    def pass_by(point, **_):
        if point == "save.rename":
            mark_attempt(tmp_path, 2)

    monkeypatch.setattr("finetune.checkpoint.write.writer.fault_point", pass_by)
    with refused(CheckpointError, "attempt 2"):
        Run(folder, asynchronous=False).train(range(1))
    assert visible(folder) == [] and not list(folder.glob(".staging-*"))
