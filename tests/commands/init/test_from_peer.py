from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.config.load import load_config

THEIRS = """
base_model: org/base-1b
datasets:
  - path: org/rows
    type: chat_template
output_dir: ./out
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-5
bf16: true
deepspeed: deepspeed_configs/zero2.json
"""


def init(*words: str):
    return CliRunner().invoke(app, ["init", *words])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(THEIRS)
    return path


def test_job_and_accelerate_file_are_written_and_checked(tmp_path, theirs):
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"), "--gpus", "4")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["job.yaml", "zero2.json", "zero2.yaml"]
    assert "num_processes: 4" in (tmp_path / "ours" / "zero2.yaml").read_text()
    assert "theirs.yaml is a config of axolotl with 11 keys: 11 mapped, 0 not needed" in result.output
    assert "job.yaml is ready." in result.output
    assert "zero2.yaml --processes 4" in result.output
    assert CliRunner().invoke(app, ["check", str(tmp_path / "ours" / "job.yaml"), "--processes", "4"]).exit_code == 0


def test_a_job_with_placeholders_is_not_called_ready(tmp_path):
    """The arguments of transformers' Trainer name neither the model nor the rows."""
    path = tmp_path / "arguments.yaml"
    path.write_text("output_dir: out\nper_device_train_batch_size: 4\nlearning_rate: 2.0e-5\nmax_steps: 10\n")
    result = init("--from", str(path), "--into", str(tmp_path / "ours"), "--peer", "trainer")
    assert result.exit_code == 0, result.output
    assert "is ready" not in result.output and "MODEL and DATASET" in result.output.splitlines()[-2]
    assert result.output.splitlines()[-1].endswith("single.yaml --processes 1")
    assert (tmp_path / "ours" / "single.yaml").is_file()


def test_unknown_keys_are_named_and_strict_makes_them_an_error(tmp_path, theirs):
    theirs.write_text(f"{THEIRS}sequence_lne: 3\n")
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"))
    assert result.exit_code == 0
    assert "line 14: sequence_lne: 3: unknown" in result.output
    assert init("--from", str(theirs), "--into", str(tmp_path / "ours"), "--strict").exit_code == 2


def test_a_job_that_does_not_check_is_not_written(tmp_path, theirs):
    theirs.write_text(THEIRS.replace("datasets:\n  - path: org/rows\n    type: chat_template\n", ""))
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"))
    assert result.exit_code == 2
    assert "data.train: the section is missing" in result.output and "Nothing was written." in result.output
    assert "start with" not in result.output and not (tmp_path / "ours").exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder that looks like a model."""
    folder = tmp_path / "my models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"messages": []}\n')
    return folder


@pytest.mark.parametrize("cwd", ["", "elsewhere"])
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("./my models/tiny", "./rows/a.jsonl"),
        ("my models/tiny", "rows/a.jsonl"),
        ("../{folder}/my models/tiny", "../{folder}/rows"),
        (".\\my models\\tiny", ".\\rows\\a.jsonl"),
        ("{root}/my models/tiny", "./rows/*.jsonl"),
    ],
)
def test_paths_are_those_of_the_folder_of_the_launch_or_of_the_file(
    tmp_path, theirs, model, monkeypatch, cwd, name, rows
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / cwd)
    name, rows = (text.format(folder=tmp_path.name, root=tmp_path) for text in (name, rows))
    theirs.write_text(THEIRS.replace("org/base-1b", f"'{name}'").replace("org/rows", f"'{rows}'"))
    result = init("--from", str(theirs), "--into", str(tmp_path / "far" / "away"))
    assert result.exit_code == 0, result.output
    loaded = load_config(tmp_path / "far" / "away" / "job.yaml")
    assert loaded.config.model.name == str(model)
    assert str(loaded.config.data.train.path).startswith(str(tmp_path / "rows"))
    assert loaded.config.run.folder == str(tmp_path / "far" / "away" / "out")


def test_missing_rows_and_models_are_named_with_their_lines_and_nothing_is_written(tmp_path, theirs):
    theirs.write_text(THEIRS.replace("org/base-1b", "./none").replace("org/rows", "../none.jsonl"))
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"))
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and not (tmp_path / "ours").exists()
    assert f'line 2: base_model: "./none", model.name: the folder {tmp_path}/none does not exist' in output
    assert f'line 4: datasets.0.path: "../none.jsonl", data.train.path: the file {tmp_path.parent}/none.jsonl' in output


URL = "https://me:hunter2@host.example/rows.jsonl"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.mark.parametrize(
    ("key", "secret"),
    [("org/rows", URL), ("./out", URL), ("org/base-1b", URL), ("org/rows", TOKEN), ("org/base-1b", TOKEN)],
)
def test_a_secret_in_a_url_or_in_the_place_of_a_name_is_never_written(tmp_path, theirs, key, secret):
    theirs.write_text(THEIRS.replace(key, secret))
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"))
    assert result.exit_code == 2 and "hunter2" not in result.output and TOKEN not in result.output
    assert "secrets do not belong in a job file" in result.output and not (tmp_path / "ours").exists()


def test_a_folder_with_another_job_is_left_alone(tmp_path, theirs):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "job.yaml").write_text("mine\n")
    result = init("--from", str(theirs), "--into", str(tmp_path / "ours"))
    assert result.exit_code == 2 and "already holds job.yaml" in result.output
    assert (tmp_path / "ours" / "job.yaml").read_text() == "mine\n"


def test_a_config_that_is_no_peers_is_one_message(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("colour: blue\n")
    result = init("--from", str(path))
    assert result.exit_code == 2
    assert "has no key that tells whose it is. Write --peer with one of axolotl" in " ".join(result.output.split())
    assert "choose one of axolotl" in init("--from", str(path), "--peer", "megatron").output
    assert "Traceback" not in result.output


def test_options_of_from_are_refused_without_it():
    result = init("--strict")
    assert result.exit_code == 2 and "they need --from FILE" in result.output
