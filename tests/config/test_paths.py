from pathlib import Path

import pytest

from finetune.config.paths import absolute, with_absolute_paths
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.config.sections.data import DataSection, SourceSection
from finetune.config.sections.model import ModelSection, TokenizerSection

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
    assert absolute(written, FOLDER) == meant


def test_a_name_stays_a_name_and_a_marked_path_becomes_absolute():
    model = ModelSection(name="org/model", tokenizer=TokenizerSection(name="./tokenizer"))
    resolved = with_absolute_paths(model, FOLDER)
    assert resolved.name == "org/model"
    assert resolved.tokenizer == TokenizerSection(name="/jobs/mine/tokenizer")


def test_paths_are_found_in_sections_within_sections():
    data = DataSection(train=SourceSection(path="a.jsonl"), max_length=8, chat_template="chatml")
    resolved = with_absolute_paths(data, FOLDER)
    assert resolved.train.path == "/jobs/mine/a.jsonl"
    assert resolved.chat_template == "chatml"
    assert resolved.train.model_fields_set == {"path"}
    assert resolved.model_fields_set == {"train", "max_length", "chat_template"}


@pytest.mark.parametrize(("written", "meant"), [("auto", "auto"), ("never", "never"), ("a", "/jobs/mine/a")])
def test_words_that_are_no_paths_stay(written, meant):
    assert with_absolute_paths(CheckpointSection(resume=written), FOLDER).resume == meant
