"""What is in a model's folder is looked at before anything reads it."""

import os

import pytest

from finetune.errors import ModelError
from finetune.model.loading.model_files import check_files


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json", "x.jinja"])
def test_a_fifo_in_a_model_folder_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}: it is a FIFO"):
        check_files(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused_and_a_link_to_a_file_is_not(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    check_files(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ModelError, match=r"tokenizer\.json: it is a folder"):
        check_files(tmp_path)
