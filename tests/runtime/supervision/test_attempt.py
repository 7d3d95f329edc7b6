"""A process of a replaced attempt stops writing."""

from pathlib import Path

import pytest

from finetune.checkpoint.format import layout
from finetune.errors import LostContact
from finetune.runtime.supervision.attempt import mark_attempt, newer_attempt, own_attempt, require_newest_attempt


def test_only_a_newer_attempt_replaces_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_newest_attempt()
    mine = mark_attempt(tmp_path, 9)
    assert own_attempt(mine) == 9 and newer_attempt(mine) is None
    mark_attempt(tmp_path, 8)  # by a host that was suspended
    mark_attempt(tmp_path, 9)  # by the other hosts of the attempt
    assert newer_attempt(mine) is None
    mark_attempt(tmp_path, 11)
    assert newer_attempt(mine) == 11
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostContact, match="attempt 11 of the run has started without this host"):
        require_newest_attempt()


def test_attempts_stage_checkpoints_in_separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = layout.staging_folder(tmp_path, 10)
    for name, value in mark_attempt(tmp_path, 2).items():
        monkeypatch.setenv(name, value)
    second = layout.staging_folder(tmp_path, 10)
    assert second != alone
    for folder in (alone, second):
        folder.mkdir()
    layout.remove_staging(tmp_path)
    assert not alone.exists() and not second.exists()
