"""The file STOP is taken back once it has been obeyed, whatever it is."""

import pytest

from finetune.run.build.loop import remove_stop_file

MAKE = [
    lambda path: path.write_text(""),
    lambda path: path.mkdir(),
    lambda path: path.symlink_to("nowhere"),
    lambda path: None,
]


@pytest.mark.parametrize("make", MAKE)
def test_a_stop_that_was_obeyed_is_removed(tmp_path, make):
    make(tmp_path / "STOP")
    said = []
    remove_stop_file(tmp_path, log=said.append)
    assert list(tmp_path.iterdir()) == [] and said == []


def test_a_folder_with_something_in_it_is_left_and_said(tmp_path):
    (tmp_path / "STOP" / "mine").mkdir(parents=True)
    said = []
    remove_stop_file(tmp_path, log=said.append)
    assert (tmp_path / "STOP" / "mine").is_dir()
    assert said[0].startswith(f"{tmp_path}/STOP cannot be removed") and "the next start would stop" in said[0]
