import pytest

from finetune.config.rules.files import file_problems
from tests.refusals import pinned


def test_a_file_that_is_not_there_is_named_in_full(complaints, tmp_path):
    (said,) = complaints("data.train.path=data/rows.jsonl")
    pinned(said, f"data.train.path: the file {tmp_path}/data/rows.jsonl")


def test_a_folder_of_rows_and_a_url_are_looked_into_when_the_run_starts(complaints, tmp_path):
    (tmp_path / "parts").mkdir()
    assert complaints("data.train.path=parts") == []
    assert complaints("data.train.path=s3://bucket/rows.jsonl") == []


def test_a_glob_must_match_something(complaints, tmp_path):
    (said,) = complaints("data.train.path=part-*.jsonl")
    pinned(said, f"{tmp_path}/part-*.jsonl")
    (tmp_path / "part-1.jsonl").touch()
    assert complaints("data.train.path=part-*.jsonl") == []


def test_both_sources_are_looked_at(complaints):
    (said,) = complaints("data.validation.path=more.jsonl", "evaluate={}")
    pinned(said, "/more.jsonl")


@pytest.mark.parametrize("key", ["model.name", "model.tokenizer.name"])
def test_a_model_folder_is_there_and_is_a_folder(complaints, tmp_path, key):
    (said,) = complaints(f"{key}=./tuned")
    pinned(said, f"{key}: the folder {tmp_path}/tuned")
    (tmp_path / "tuned").touch()
    (said,) = complaints(f"{key}=./tuned")
    pinned(said, f"{key}: {tmp_path}/tuned")


def test_a_folder_that_has_the_name_of_a_hub_model_is_asked_about(complaints, tmp_path):
    (tmp_path / "gpt2").mkdir()
    (said,) = complaints()
    pinned(said, "model.name: `gpt2`", "`./gpt2`")
    assert complaints("model.name=./gpt2") == []


def test_a_template_file_and_a_checkpoint_are_there(complaints):
    first, second = complaints(
        "data.chat_template=./mine.jinja", "checkpoint.resume=runs/first/checkpoints/step-000004"
    )
    pinned(first, "/mine.jinja")
    pinned(second, "checkpoint.resume: ")


@pytest.mark.parametrize("folder", ["rows.jsonl", "rows.jsonl/runs/first"])
def test_a_run_folder_cannot_lie_in_a_file(complaints, tmp_path, folder):
    (said,) = complaints(f"run.folder={folder}")
    pinned(said, f"run.folder: {tmp_path}/rows.jsonl")


def test_a_run_folder_that_is_not_writable_is_reported_even_to_root(complaints):
    (said,) = complaints("run.folder=/proc/runs/first")
    pinned(said, "run.folder: /proc")


def test_an_unreadable_file_is_named(complaints, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("rows.jsonl"))
    (said,) = complaints()
    pinned(said, "rows.jsonl")


def test_checking_files_writes_nothing(load, tmp_path):
    loaded = load()
    assert file_problems(loaded.config, folder=tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "rows.jsonl"]
