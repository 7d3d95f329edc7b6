"""The file STOP is removed once the run has stopped, whatever it is."""

import pytest

from finetune.run.setup.loop import remove_stop_file

MAKE = [
    lambda path: path.write_text(""),
    lambda path: path.mkdir(),
    lambda path: path.symlink_to("nowhere"),
    lambda path: None,
]


@pytest.mark.parametrize("make", MAKE)
def test_a_stop_that_was_obeyed_is_removed(tmp_path, make):
    make(tmp_path / "STOP")
    logged = []
    remove_stop_file(tmp_path / "STOP", log=logged.append)
    assert list(tmp_path.iterdir()) == [] and logged == []


def test_a_non_empty_folder_named_stop_is_kept_and_logged(tmp_path):
    (tmp_path / "STOP" / "mine").mkdir(parents=True)
    logged = []
    remove_stop_file(tmp_path / "STOP", log=logged.append)
    assert (tmp_path / "STOP" / "mine").is_dir()
    assert logged[0].startswith(f"{tmp_path}/STOP cannot be removed") and "the next start stops" in logged[0]
