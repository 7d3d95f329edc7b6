from pathlib import Path

import pytest

from finetune.config.paths import absolute_path, is_url, local_run_folder, with_absolute_paths
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.model import ModelSection, TokenizerSection
from finetune.config.sections.run import RunSection

FOLDER = Path("/jobs/mine")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("rows.jsonl", "/jobs/mine/rows.jsonl"),
        ("./rows.jsonl", "/jobs/mine/rows.jsonl"),
        ("../data/*.jsonl", "/jobs/data/*.jsonl"),
        ("/data/rows.jsonl", "/data/rows.jsonl"),
        ("~/rows.jsonl", f"{Path.home()}/rows.jsonl"),
    ],
)
def test_a_path_counts_from_the_folder(written, meant):
    assert absolute_path(written, FOLDER) == meant


def test_a_name_stays_a_name_and_a_marked_path_becomes_absolute():
    model = ModelSection(name="org/model", tokenizer=TokenizerSection(name="./tokenizer"))
    resolved = with_absolute_paths(model, FOLDER)
    assert resolved.name == "org/model"
    assert resolved.tokenizer == TokenizerSection(name="/jobs/mine/tokenizer")


def test_paths_are_found_in_sections_within_sections():
    data = DataSection(train=TrainingSourceSection(path="a.jsonl"), max_length=8, chat_template="chatml")
    resolved = with_absolute_paths(data, FOLDER)
    assert resolved.train.path == "/jobs/mine/a.jsonl"
    assert resolved.chat_template == "chatml"
    assert resolved.train.model_fields_set == {"path"}
    assert resolved.model_fields_set == {"train", "max_length", "chat_template"}


@pytest.mark.parametrize(("written", "meant"), [("auto", "auto"), ("never", "never"), ("a", "/jobs/mine/a")])
def test_values_that_are_not_paths_stay_unchanged(written, meant):
    assert with_absolute_paths(CheckpointSection(resume=written), FOLDER).resume == meant


def test_a_url_is_not_treated_as_a_path():
    assert with_absolute_paths(RunSection(folder="s3://bucket/runs/a"), FOLDER).folder == "s3://bucket/runs/a"
    assert is_url("memory://a/b") and not is_url("/a://b") and not is_url("C:/a")


def test_a_run_at_a_url_is_staged_in_a_folder_of_its_own_or_in_the_one_that_was_written():
    first, second = (local_run_folder(f"s3://bucket/{team}/first", None) for team in ("red", "blue"))
    assert first != second
    assert first.parent == Path.home() / ".cache/finetune/runs"
    assert first.name.startswith("first-")
    assert local_run_folder("s3://bucket/red/first/", None) == first
    assert local_run_folder("s3://bucket/red/first", "/fast/stage") == Path("/fast/stage")
    assert local_run_folder("/runs/first", None) == Path("/runs/first")
