"""A new folder is never within what was written whole."""

import os

import pytest

from finetune.commands.source import new_folder
from finetune.errors import UserError
from tests.refusals import refused


@pytest.fixture
def run(tmp_path):
    """Return a run folder with a checkpoint, a model and a link to the checkpoint."""
    for folder, name in ((".", "resolved.yaml"), ("checkpoints/step-000004", "manifest.json")):
        (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / folder / name).write_text("{}")
    (tmp_path / "run/final").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run/checkpoints/step-000004")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step-000004/exported",
        "checkpoints/step-000008",
        "../adapter/merged",
        "../link/exported",
        "exports/../final/merged",
    ],
)
def test_a_place_within_a_checkpoint_or_a_model_is_refused(run, name):
    with refused(UserError):
        new_folder(run / name)


@pytest.mark.parametrize("name", ["exports/step-000004", "../elsewhere/final", "final-merged", "../checkpoints/a"])
def test_any_other_new_place_is_taken(run, name):
    assert new_folder(run / name) == (run / name).absolute()


def test_a_folder_that_exists_is_refused_and_a_relative_one_is_made_absolute(run, monkeypatch):
    monkeypatch.chdir(run)
    assert os.fspath(new_folder(run / "x")) == os.fspath(new_folder(run.joinpath("x").relative_to(run)))
    with refused(UserError):
        new_folder(run / "final")
