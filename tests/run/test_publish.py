"""What a run leaves goes to the hub where its job asks for that, and a push that fails fails no training."""

import json
import shutil

import pytest

from finetune.config.load import load_config
from finetune.errors import HubError
from finetune.run import publish
from finetune.run.publish import publish_final


@pytest.fixture
def over(trained, job, tmp_path):
    """Return a function that publishes a finished run whose job asks for it; and what was said, and the record."""
    folder = shutil.copytree(trained("full"), tmp_path / "run")

    def ask(*overrides):
        loaded = load_config(job, [f"run.folder={folder}", *overrides])
        said = []
        publish_final(loaded, say=said.append)
        return said, json.loads((folder / "final.json").read_text())

    return ask


def test_final_is_uploaded_once(over, monkeypatch):
    pushed = []
    monkeypatch.setattr(publish, "push_folder", lambda *given, **keys: pushed.append((given, keys)) or "https://hub/x")
    wish = ["export.push_to_hub=me/model", "export.private=false"]
    said, record = over(*wish)
    assert said == ["uploaded to https://hub/x"]
    assert record["pushed_to"] == "me/model"
    assert over(*wish)[0] == []
    (((folder, name), keys),) = pushed
    assert (folder.name, name, keys) == ("final", "me/model", {"private": False})


def test_a_failure_is_a_warning_and_is_tried_again(over, monkeypatch):
    def fail(*_, **__):
        raise HubError("`me/model` was not uploaded: no network.")

    monkeypatch.setattr(publish, "push_folder", fail)
    for _ in range(2):
        said, record = over("export.push_to_hub=me/model")
        assert said == ["warning: export.push_to_hub: `me/model` was not uploaded: no network."]
        assert (record["pushed_to"], record["push_problem"]) == (None, "`me/model` was not uploaded: no network.")


def test_nothing_is_pushed_that_was_not_asked_for(over, monkeypatch):
    monkeypatch.setattr(publish, "push_folder", None)
    said, record = over()
    assert said == [] and "pushed_to" not in record
