import pytest

from finetune.config.rules.files import file_problems


def test_a_file_that_is_not_there_is_named_in_full(complaints, tmp_path):
    assert complaints("data.train.path=data/rows.jsonl") == [
        f"--set data.train.path=data/rows.jsonl, data.train.path: the file {tmp_path}/data/rows.jsonl does not exist. "
        "A relative path is resolved against the config file's folder."
    ]


def test_a_folder_of_rows_and_a_url_are_looked_into_when_the_run_starts(complaints, tmp_path):
    (tmp_path / "parts").mkdir()
    assert complaints("data.train.path=parts") == []
    assert complaints("data.train.path=s3://bucket/rows.jsonl") == []


def test_a_glob_must_match_something(complaints, tmp_path):
    (said,) = complaints("data.train.path=part-*.jsonl")
    assert f"no file matches {tmp_path}/part-*.jsonl." in said
    (tmp_path / "part-1.jsonl").touch()
    assert complaints("data.train.path=part-*.jsonl") == []


def test_both_sources_are_looked_at(complaints):
    (said,) = complaints("data.validation.path=more.jsonl", "evaluate={}")
    assert "/more.jsonl does not exist." in said


@pytest.mark.parametrize("key", ["model.name", "model.tokenizer.name"])
def test_a_model_folder_is_there_and_is_a_folder(complaints, tmp_path, key):
    (said,) = complaints(f"{key}=./tuned")
    assert f"{key}: the folder {tmp_path}/tuned does not exist." in said
    (tmp_path / "tuned").touch()
    (said,) = complaints(f"{key}=./tuned")
    assert f"{key}: {tmp_path}/tuned is a file." in said


def test_a_folder_that_has_the_name_of_a_hub_model_is_asked_about(complaints, tmp_path):
    (tmp_path / "gpt2").mkdir()
    (said,) = complaints()
    assert (
        "model.name: `gpt2` means a hub model, but a folder with that name exists. For the folder write `./gpt2`."
        in said
    )
    assert complaints("model.name=./gpt2") == []


def test_a_template_file_and_a_checkpoint_are_there(complaints):
    said = complaints("data.chat_template=./mine.jinja", "checkpoint.resume=runs/first/checkpoints/step-000004")
    assert "/mine.jinja does not exist." in said[0]
    assert "checkpoint.resume: the checkpoint" in said[1]


@pytest.mark.parametrize("folder", ["rows.jsonl", "rows.jsonl/runs/first"])
def test_a_run_folder_cannot_lie_in_a_file(complaints, tmp_path, folder):
    (said,) = complaints(f"run.folder={folder}")
    assert f"run.folder: {tmp_path}/rows.jsonl is a file. Choose another folder." in said


def test_a_run_folder_that_is_not_writable_is_reported_even_to_root(complaints):
    (said,) = complaints("run.folder=/proc/runs/first")
    assert "run.folder: /proc is not writable." in said


def test_an_unreadable_file_is_named(complaints, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("rows.jsonl"))
    (said,) = complaints()
    assert "rows.jsonl cannot be read. Check its permissions." in said


def test_checking_files_writes_nothing(load, tmp_path):
    loaded = load()
    assert file_problems(loaded.config, folder=tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "rows.jsonl"]
