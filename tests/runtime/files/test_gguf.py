"""A GGUF file that is given as a model is answered with the command that converts it."""

import shlex

import pytest

from finetune.config.load import load_values
from finetune.errors import ConfigError, ModelError
from finetune.model.loading.hub import resolve_name
from finetune.model.loading.saved import inspect_model_folder
from finetune.runtime.files.read import gguf_advice


@pytest.fixture
def file(tmp_path):
    """The only file of a folder."""
    path = tmp_path / "models" / "tiny model.Q8_0.gguf"
    path.parent.mkdir()
    path.touch()
    return path


def test_only_a_gguf_file_or_a_folder_without_another_model_is_meant(file):
    assert gguf_advice(file) == gguf_advice(file.parent)
    assert str(file) in gguf_advice(file)
    (file.parent / "config.json").write_text("{}")  # an export for llama.cpp has both
    assert gguf_advice(file.parent) is None
    assert gguf_advice(file.with_name("missing.gguf")) is None
    assert gguf_advice(file.parent / "config.json") is None


def test_the_command_names_folder_file_and_target(file):
    program, option, code, *arguments = shlex.split(gguf_advice(file).splitlines()[-1])
    assert (program, option) == ("python", "-c")
    assert arguments == [str(file.parent), file.name, "./tiny model.Q8_0"]
    compile(code, "advice", "exec")


def job(name):
    return {
        "run": {"folder": "runs/x"},
        "model": {"name": name},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 8},
        "task": {"name": "sft"},
        "train": {"global_batch_size": 1, "microbatch_size": 1, "steps": 1, "learning_rate": 1e-3},
    }


@pytest.mark.parametrize("name", ["./models", "./models/tiny model.Q8_0.gguf", "models/tiny model.Q8_0.gguf"])
def test_a_job_that_names_it_is_refused(file, tmp_path, name):
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        load_values(job(name), folder=tmp_path)
    (problem,) = caught.value.problems
    assert problem.key == "model.name" and problem.message == gguf_advice(file)


def test_commands_that_take_a_model_refuse_it(file):
    with pytest.raises(ModelError, match=r"^--tokenizer: .* is a GGUF file"):
        resolve_name(str(file), key="--tokenizer")
    for source in (file, file.parent):
        with pytest.raises(ModelError, match=r"^chat: .* is a GGUF file"):
            inspect_model_folder(source, key="chat")
