"""A job in Python: validated as a file is, dumped to one, with objects in the place of files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import ConfigError, DataError, Job, ModelError, UserError, check, load_job
from finetune.config.load import load_config
from finetune.config.sections.train import TrainSection
from finetune.model.processing import train_or_load_tokenizer
from tests.api.jobs import rows, sections
from tests.small_job import write_job


def with_rows(folder: Path, given: Any) -> Job:
    data = {"train": given, "max_length": 128, "chat_template": "chatml"}
    return Job(**sections(folder, data=data, evaluate=None))


def files(job: Job) -> list[Path]:
    """Return the files with rows that the job writes."""
    path = Path(str(job.load().config.data.train.path))
    return sorted(path.parent.glob("rows-*"))


def small_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes))


def test_every_problem_of_a_python_job_is_reported_at_once(tmp_path):
    wrong = sections(tmp_path, trian={}, task={"name": "sfd"}, report={"console": object()})
    wrong["train"] = {"global_batch_size": 8, "stepz": 4, "lr": 1e-2}
    with pytest.raises(ConfigError) as raised:
        Job(**{**wrong, "report": None})
    text = str(raised.value)
    assert text.startswith("the job has ")
    assert "trian: there is no such key. Did you mean `train`?" in text
    assert "train.stepz: there is no such key. Did you mean `steps`?" in text
    assert "train.lr: there is no such key. Did you mean `learning_rate`?" in text
    assert "task.name" in text
    with pytest.raises(ConfigError, match=r"report.console: an object of type `object` cannot stand here"):
        Job(**wrong)


def test_a_section_may_be_a_section_object_and_numbers_may_be_numpys(tmp_path):
    train = TrainSection(global_batch_size=8, microbatch_size=4, steps=4, learning_rate=0.01)
    plain, typed = sections(tmp_path), sections(tmp_path, train=train)
    typed["run"] = {"folder": tmp_path / "run", "seed": np.int64(7)}
    assert Job(**plain).config == Job(**typed).config


def test_a_job_is_saved_as_a_file_that_is_the_same_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(**sections(Path("relative")))
    (tmp_path / "elsewhere").mkdir()
    path = job.save(tmp_path / "elsewhere" / "job.yaml")
    assert load_config(path).config == job.load().config
    assert load_job(path).config == job.load().config
    assert job.config.run.folder == str(tmp_path / "relative" / "run")
    assert "weight_decay" not in path.read_text()  # what was not written stays a default


def test_overrides_change_a_job_of_either_kind(tmp_path):
    file = write_job(tmp_path)
    overrides = {"train.steps": 3, "model.lora": {"rank": 4}}
    for job in (load_job(file, overrides=overrides), load_job(file), Job(**sections(tmp_path))):
        config = job.load(overrides).config
        assert (config.train.steps, config.model.lora.rank if config.model.lora else None) == (3, 4)
    assert "budget   3 steps" in check(file, overrides={"train.steps": 3})
    with pytest.raises(ConfigError, match="Did you mean `steps`"):
        check(file, overrides={"train.stepz": 2})


@pytest.mark.parametrize(
    "given",
    [rows(), tuple(rows()), lambda: rows(), lambda: iter(rows())],
    ids=["list", "tuple", "function", "function of an iterator"],
)
def test_the_same_rows_are_the_same_file_however_they_are_given(tmp_path, given):
    expected = files(with_rows(tmp_path, rows()))
    assert files(with_rows(tmp_path, given)) == expected
    assert len(expected) == 1


def test_an_iterator_is_read_once_and_used_again(tmp_path):
    def generate() -> Iterator[dict[str, object]]:
        yield from rows()

    job = with_rows(tmp_path, generate())
    first = files(job)
    assert files(job) == first
    other = Path(str(job.load({"run.folder": str(tmp_path / "other")}).config.data.train.path))
    assert other.is_relative_to(tmp_path / "other") and other.read_bytes() == first[0].read_bytes()


def test_a_dataset_is_written_as_a_table(tmp_path):
    job = with_rows(tmp_path, datasets.Dataset.from_list(rows()))
    (path,) = files(job)
    assert path.suffix == ".parquet"
    assert pyarrow.parquet.read_table(path).num_rows == 50


def test_rows_may_stand_wherever_a_path_does(tmp_path):
    mix = [{"path": rows(20), "weight": 1.0}, {"path": rows(30, seed=3), "weight": 2.0, "take": 10}]
    data = {"train": {"mix": mix}, "validation": {"path": rows(7, seed=2), "format": "messages"}, "max_length": 64}
    config = Job(**sections(tmp_path, data={**data, "chat_template": "chatml"})).load().config
    written = [str(source.path) for source in config.data.train.mix]
    assert len(set(written)) == 2 and all(Path(path).is_file() for path in written)
    assert config.data.validation is not None and Path(str(config.data.validation.path)).is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data.train: there are no rows"),
        ([{"text": "a"}, "b"], "data.train: row 2 is of type `str`, not a dict of its columns."),
        ([{"text": torch.zeros(2)}], "data.train: row 1 cannot be written as JSON"),
        ([{"text": float("nan")}], "data.train: row 1 cannot be written as JSON"),
        (lambda: 3, "data.train: `int` is not an iterable of rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(2))}), "Give one of them: 'train'"),
        (datasets.Dataset.from_list(rows(2)).to_pandas(), "datasets.Dataset.from_pandas"),
        (datasets.Dataset.from_list([]), "data.train: the dataset has no rows"),
    ],
)
def test_rows_that_are_none_are_refused_with_one_message(tmp_path, given, message):
    job = with_rows(tmp_path, given)
    with pytest.raises(DataError) as raised:
        job.load()
    assert message in str(raised.value)
    assert not list(tmp_path.rglob("*finetune-tmp"))


def test_an_object_that_is_no_iterable_is_refused_when_the_job_is_made(tmp_path):
    with pytest.raises(ConfigError, match="`3`"):
        with_rows(tmp_path, 3)
    with pytest.raises(UserError):
        check([1, 2])  # type: ignore[arg-type]


def test_a_model_object_is_written_once_under_the_digest_of_its_content(tmp_path):
    model = small_llama().to(torch.bfloat16)
    tokenizer = {"train": {"vocabulary_size": 320}}
    job = Job(**sections(tmp_path, model={"name": model, "tokenizer": tokenizer}))
    path = Path(str(job.load().config.model.name))
    assert path == Path(str(job.load().config.model.name)) and (path / "model.safetensors").is_file()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert Path(str(job.load().config.model.name)) != path
    with pytest.raises(ModelError, match="meta device"):
        Job(**sections(tmp_path, model={"name": model.to("meta"), "tokenizer": tokenizer})).load()


def test_a_section_that_stands_for_a_name_may_be_the_object_itself(tmp_path):
    job = Job(**sections(tmp_path, model=small_llama()))
    assert str(job.load().config.model.name).startswith(str(tmp_path / "run" / "given" / "model-"))


@pytest.mark.parametrize("origin", ["folder", "cache"])
def test_a_model_alone_has_the_tokenizer_that_it_was_loaded_with(tmp_path, monkeypatch, origin):
    folder = tmp_path / "saved"
    if origin == "cache":  # of the hub, at another commit than `main`
        cache = tmp_path / "hub"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        folder = cache / "models--org--small" / "snapshots" / "c0ffee"
    small_llama().save_pretrained(folder)
    tokenizer = train_or_load_tokenizer(
        lambda: ["a. b."], vocabulary_size=300, cache_folder=tmp_path, log=lambda _: None
    )
    tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    if origin == "cache":
        model.name_or_path, model.config._commit_hash = "org/small", "c0ffee"
    assert Job(**sections(tmp_path, model=model)).config.model.tokenizer.name == str(folder)
    assert Job(**sections(tmp_path, model={"name": model})).load().config.model.tokenizer.name == str(folder)
    named = Job(**sections(tmp_path, model={"name": model, "tokenizer": {"train": {"vocabulary_size": 320}}}))
    assert named.config.model.tokenizer.name is None
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert Job(**sections(tmp_path, model=model)).config.model.tokenizer is None
