"""A folder is made once, by one process, and appears whole."""

import json

import pytest

from finetune.runtime.files import make_once, write_json


def make(folder, build, **named):
    said = []
    return make_once(folder, build, say=said.append, **named), said


def test_a_folder_that_is_there_is_not_made(tmp_path):
    build = lambda staging: (staging / "file").write_text("made")  # noqa: E731
    assert make(tmp_path / "folder", build) == (True, [])
    assert make(tmp_path / "folder", None) == (False, [])
    assert (tmp_path / "folder" / "file").read_text() == "made"


def fail(staging):
    (staging / "half").write_text("half")
    raise OSError("no room")


def test_what_an_unfinished_build_leaves_is_removed(tmp_path):
    with pytest.raises(OSError, match="no room"):
        make(tmp_path / "folder", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".folder.lock"]


def test_a_build_that_goes_on_finds_what_it_has_left(tmp_path):
    with pytest.raises(OSError, match="no room"):
        make(tmp_path / "folder", fail, goes_on=True)
    assert not (tmp_path / "folder").exists()
    make(tmp_path / "folder", lambda staging: (staging / "rest").write_text("rest"), goes_on=True)
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["half", "rest"]


def test_a_build_that_begins_anew_finds_nothing_of_one_that_was_killed(tmp_path):
    killed = tmp_path / ".folder.making"
    killed.mkdir()
    (killed / "half").write_text("half")
    make(tmp_path / "folder", lambda staging: (staging / "rest").write_text("rest"))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["rest"]


def test_json_is_written_without_secrets_unless_it_is_counted_on(tmp_path):
    value = {"url": "https://h/?token=c0ffee", "path": "\udcff\x9b"}
    write_json(tmp_path / "record.json", value)
    write_json(tmp_path / "exact.json", value, exact=True)
    read = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("record", "exact")]
    assert read == [value | {"url": "https://h/?token=[redacted]"}, value]
