"""A run's config is read back from its folder, wherever that is by now and whatever has become of its data."""

import os
import re
from pathlib import Path

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config, load_resolved
from finetune.config.schema import describe_values, node_at
from finetune.config.section import NAMED_SECTIONS
from finetune.errors import ConfigError, UserError
from finetune.runtime.text.terminal import escape_controls
from tests.refusals import pinned, refused
from tests.small_job import write_job


def test_a_job_is_loaded_with_the_source_of_every_written_key(load):
    loaded = load("train.steps=20", "report.trackers=[wandb]")
    assert loaded.config.train.steps == 20
    assert loaded.config.train.learning_rate == 1e-4
    assert str(loaded.sources["train.learning_rate"]) == "job.yaml line 15"
    assert str(loaded.sources["train.steps"]) == "--set train.steps=20"
    assert str(loaded.sources["report.trackers.0"]) == "--set report.trackers=[wandb]"
    assert "checkpoint" not in loaded.sources
    assert loaded.text == loaded.path.read_text()


def test_relative_paths_count_from_the_folder_of_the_file(load, job, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    config = load("checkpoint.resume=never", "data.cache_folder=./cache").config
    assert config.run.folder == str(tmp_path / "runs/first")
    assert config.data.train.path == str(tmp_path / "rows.jsonl")
    assert config.data.cache_folder == str(tmp_path / "cache")
    assert config.checkpoint.resume == "never"
    assert config.model.name == "gpt2"


def test_a_text_in_the_place_of_a_model_or_tokenizer_is_its_name(job, tmp_path):
    (tmp_path / "vocabulary").mkdir()
    text = re.sub(r"model:.*?\n(?=data:)", "model: gpt2\n", job.read_text(), flags=re.DOTALL)
    job.write_text(text)
    line = text[: text.index("model: gpt2")].count("\n") + 1
    loaded = load_config(job, ["model.tokenizer=./vocabulary", "model.attention=eager"])
    assert loaded.config.model.name == "gpt2" and loaded.config.model.attention == "eager"
    assert loaded.config.model.tokenizer.name == str(tmp_path / "vocabulary")
    assert str(loaded.sources["model.name"]) == f"job.yaml line {line}"
    job.write_text(text.replace("model: gpt2", "model: ./absent"))
    with refused(ConfigError, f"line {line}, model.name: ", "absent"):
        load_config(job)
    assert load_config(job, ["model=gpt2"]).config.model.name == "gpt2"


@pytest.mark.parametrize("key", NAMED_SECTIONS)
def test_the_schema_allows_a_text_in_the_place_of_a_named_section(key):
    assert describe_values(node_at(key)).startswith("a name or a path or a section")


def test_all_problems_are_reported_at_once_in_file_order(job):
    job.write_text(job.read_text().replace("name: sft", "name: sft\n  max_lenght: 3").replace("size: 8", "size: 9"))
    with refused(ConfigError, "job.yaml has 4 problems") as caught:
        load_config(job, ["train.steps=ten", "optimizer=sgd"])
    assert [line.partition(": ")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "line 11, task.max_lenght",
        "line 13, train.global_batch_size",
        "--set train.steps=ten, train.steps",
        "--set optimizer=sgd, optimizer",
    ]


def test_an_invalid_key_does_not_hide_other_problems(complaints):
    said = complaints("model.dtype=half", "train.optimizer.nme=sgd", "train.schedule.decay_fraction=0.1", "evaluate={}")
    assert [line.partition(": ")[0].rpartition(" ")[2] for line in said] == [
        "model.dtype",
        "train.optimizer.nme",
        "train.schedule.decay_fraction",
        "evaluate",
    ]


def test_rules_skip_keys_with_invalid_values(complaints):
    assert len(complaints("train.steps=ten")) == 1  # not: "there is no budget"
    assert len(complaints("train.steps=null", "train.stepz=10")) == 1  # `steps` was meant
    assert len(complaints("train.microbatch_size=four")) == 1


def test_an_unknown_key_that_means_a_missing_one_is_one_problem(job, complaints):
    text = job.read_text().replace("learning_rate:", "lr:").replace("max_length:", "max_lenght:")
    first, second = complaints(text=text)
    pinned(first, "line 8, data.max_lenght: ", "`max_length`")
    pinned(second, "line 15, train.lr: ", "`learning_rate`")


def test_an_override_replaces_an_invalid_value_of_the_file(job, complaints):
    text = job.read_text().replace("folder: runs/first", "folder: ${HOME}/runs").replace("steps: 10", "steps:")
    assert len(complaints(text=text)) == 2
    assert complaints("run.folder=runs", "train.steps=5", text=text) == []


def test_a_key_written_twice_is_an_error_with_both_lines(job, complaints):
    text = job.read_text() + "  steps: 20\n"
    (said,) = complaints(text=text)
    pinned(said, "line 16, train.steps: ", "line 14")


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_a_file_that_is_not_a_job_is_rejected_with_the_required_sections(complaints, text):
    (said,) = complaints(text=text)
    pinned(said, "`run`, `model`, `data`, `task` and `train`")


def test_a_file_that_is_not_there_names_the_one_that_is(job):
    with refused(ConfigError, "job.yaml"):
        load_config(job.with_name("jobs.yaml"))


def test_a_folder_and_bytes_are_not_a_job(job):
    with refused(ConfigError):
        load_config(job.parent)
    job.write_bytes(b"run:\n  folder: \xff\n")
    with refused(ConfigError):
        load_config(job)


def test_missing_sections_are_reported_with_their_required_keys(complaints):
    said = complaints(text="run:\n  folder: runs\n")
    assert [line.partition(":")[0] for line in said] == ["data", "model", "task", "train"]
    assert "It needs `data.train`." in said[0]


def test_evaluation_is_off_unless_it_is_written(load):
    assert load().config.evaluate is None
    evaluated = load("data.validation.path=rows.jsonl", "evaluate={}").config.evaluate
    assert evaluated is not None
    assert evaluated.every_steps is None


@pytest.fixture
def run(job, tmp_path):
    """The folder of a run whose data is gone."""
    folder = tmp_path / "moved"
    folder.mkdir()
    (folder / "resolved.yaml").write_text(resolved_yaml(load_config(job)))
    (tmp_path / "rows.jsonl").unlink()
    return folder


def test_load_resolved_returns_the_recorded_config_with_the_current_folder(run, tmp_path):
    loaded = load_resolved(run)
    assert loaded.config.run.folder == str(run)
    assert loaded.config.data.train.path == str(tmp_path / "rows.jsonl")
    assert loaded.config.train.learning_rate == 1e-4
    assert loaded.text == (run / "resolved.yaml").read_text()


def test_a_run_that_recorded_fsdp1_is_one_of_fsdp2(run):
    path = run / "resolved.yaml"
    text = path.read_text()
    assert "strategy: null" in text
    path.write_text(text.replace("strategy: null", "strategy: fsdp1"))
    assert load_resolved(run).config.run.strategy == "fsdp2"


def test_a_folder_without_resolved_yaml_is_rejected_as_a_run(tmp_path):
    with refused(UserError, "resolved.yaml"):
        load_resolved(tmp_path)


def test_a_resolved_config_of_another_version_is_rejected_with_the_unknown_key(run):
    path = run / "resolved.yaml"
    path.write_text(path.read_text().replace("learning_rate:", "lerning_rate:"))
    with refused(UserError, "train.learning_rate"):
        load_resolved(run)


def test_control_characters_are_escaped_in_the_resolved_config_and_read_back(job, tmp_path):
    meant = "a\x1b]8;;x\x07 \x9b\u202e\u2028\ufeff\U000e0041 ü"
    written_so = escape_controls(meant.replace("\x1b", "\\e").replace("\x07", "\\a"))
    evil = job.with_name("jo\x9bb\u202e.yaml")
    evil.write_text(job.read_text().replace("max_length: 64", f'max_length: 64\n  system_prompt: "{written_so}"'))
    written = resolved_yaml(load_config(evil))
    assert escape_controls(written) == written
    (tmp_path / "resolved.yaml").write_text(written)
    assert load_resolved(tmp_path).config.data.system_prompt == meant


def test_secrets_are_not_written_down(job):
    signed = 'data.train.path="https://h/x.jsonl?sig=c0ffee"'
    written = resolved_yaml(load_config(job, [signed, "export.push_to_hub=me/hf_c0ffeeAbcdefghijklmn"]))
    assert "https://h/x.jsonl?sig=[redacted]" in written
    assert "c0ffee" not in written


def test_a_folder_whose_path_is_not_utf8_is_refused(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    job = write_job(folder)
    with refused(ConfigError):
        load_config(job)
