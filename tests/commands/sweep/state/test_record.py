"""What a sweep remembers, and what it refuses to continue."""

import json
from pathlib import Path

import pytest

from finetune.commands.sweep.state.record import (
    RecordedRun,
    SweepState,
    lock_sweep,
    read_state,
    require_same_job,
    write_state,
)
from finetune.errors import UserError

STATE = SweepState(
    "/job.yaml",
    {"train.steps": "10", "run.seed": "42"},
    ("train.learning_rate",),
    {"a": RecordedRun("a", {"train.learning_rate": 1e-4}, 12.5, 1, "no memory")},
)


def test_what_is_written_is_read_back(tmp_path):
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    assert STATE.names() == {'{"train.learning_rate": 0.0001}': "a"}


def test_a_new_folder_and_one_whose_file_was_deleted_have_no_state(tmp_path):
    assert read_state(tmp_path / "new") is None
    (tmp_path / "runs").mkdir()
    assert read_state(tmp_path) is None


def test_another_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is not the folder of a sweep: it has `thesis.tex`"):
        read_state(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read_state(tmp_path / "thesis.tex")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "job": 3}', "null", "[" * 5000])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=r"the file is damaged: .* Delete it"):
        read_state(tmp_path)


def test_a_file_of_another_version_is_refused(tmp_path):
    write_state(tmp_path, STATE)
    stored = json.loads((tmp_path / "sweep.json").read_text()) | {"version": 2}
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="another version of finetune"):
        read_state(tmp_path)


def test_a_changed_job_is_refused_by_the_names_of_its_keys(tmp_path):
    now = {"train.steps": "20", "run.seed": "42", "model.name": '"gpt2"'}
    with pytest.raises(UserError) as error:
        require_same_job(STATE, now, swept=frozenset({"train.learning_rate"}), folder=tmp_path)
    assert "train.steps: `10` then, `20` now" in str(error.value)
    assert 'model.name: not set then, `"gpt2"` now' in str(error.value)
    require_same_job(STATE, now, swept=frozenset({"train.steps", "model"}), folder=tmp_path)


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    with (
        lock_sweep(tmp_path),
        pytest.raises(UserError, match="another `finetune sweep` is running"),
        lock_sweep(tmp_path),
    ):
        pass
    with lock_sweep(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(UserError, match="cannot be written"), lock_sweep(Path("/proc/none/sweep")):
        pass
