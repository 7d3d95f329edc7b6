"""Accelerate files and DeepSpeed configs are found by name and from any folder."""

from pathlib import Path

import pytest

import finetune
from finetune.errors import UserError
from finetune.registry.accelerate_files import accelerate_file_names, find_accelerate_file, find_deepspeed_file

ROOT = Path(__file__).parents[2]
PACKAGE = Path(finetune.__file__).parent


@pytest.mark.parametrize("folder", ["accelerate_configs", "ds_configs"])
def test_the_files_of_the_package_are_those_of_the_top_level(folder):
    top = {path.name: path.read_bytes() for path in (ROOT / folder).iterdir()}
    shipped = {path.name: path.read_bytes() for path in (PACKAGE / folder).iterdir()}
    assert len(top) >= 5
    assert shipped == top


def test_every_file_has_a_name_and_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = accelerate_file_names()
    assert {"ddp", "fsdp2", "zero2", "zero3", "multi_node_zero3"} <= set(names)
    assert [find_accelerate_file(name).stem for name in names] == names
    assert all(find_accelerate_file(name).is_file() for name in names)


def test_a_file_in_the_current_folder_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero2").write_text("distributed_type: NO\n")
    assert find_accelerate_file("zero2") == Path("zero2")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("fsdp3", "Did you mean `fsdp2`"),
        ("accelerate_configs/zero2.yaml", "Did you mean `zero2`"),
        ("nothing_alike", "Names: ddp, "),
        (".", "is a folder"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, monkeypatch, written, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find_accelerate_file(written)


def test_a_deepspeed_config_is_looked_up_here_then_next_to_the_accelerate_file_then_in_the_package(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    accelerate_file, written = tmp_path / "launch" / "mine.yaml", "ds_configs/zero2.json"
    places = [tmp_path / written, accelerate_file.parent / written]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text("{}")
    assert find_deepspeed_file(written, accelerate_file=accelerate_file) == Path(written)
    places[0].unlink()
    assert find_deepspeed_file(written, accelerate_file=accelerate_file) == places[1]
    places[1].unlink()
    assert find_deepspeed_file(written, accelerate_file=accelerate_file) == PACKAGE / written
    assert find_deepspeed_file("zero2.json", accelerate_file=None) == PACKAGE / written


def test_a_deepspeed_config_that_is_nowhere_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for written in ("mine.json", str(tmp_path / "mine.json")):
        assert find_deepspeed_file(written, accelerate_file=None) == Path(written)
