"""`finetune migrate` renames keys and keeps comments; `check --against` lists defaults that have changed."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.commands import check as check_module
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from finetune.config.rules import versions
from finetune.config.rules.versions import RenamedKey
from tests.small_job import JOB, write_job

ROOT = Path(__file__).parents[2]
RENAMED = (
    RenamedKey("train.num_steps", "train.steps", since="0.3"),
    RenamedKey("task.longest", "data.max_length", since="0.3"),
)
OLD_JOB = """# The job of a test.

run: {folder: runs/job, seed: 7}  # where it goes
model:
  from_config:
    model_type: llama
    values: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  # the rows
  train: {path: train.jsonl}
  chat_template: 'chatml'  # the quotes stay
task:
  name: sft
  longest: 128  # in tokens
train:
  global_batch_size: 8   # samples
  microbatch_size: 4
  num_steps: 8     # the budget
  learning_rate: 1e-2
"""
NEW_JOB = """# The job of a test.

version: 1
run: {folder: runs/job, seed: 7}  # where it goes
model:
  from_config:
    model_type: llama
    values: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  # the rows
  train: {path: train.jsonl}
  chat_template: 'chatml'  # the quotes stay
  max_length: 128 # in tokens
task:
  name: sft
train:
  global_batch_size: 8   # samples
  microbatch_size: 4
  steps: 8         # the budget
  learning_rate: 1e-2
"""


@pytest.fixture
def renamed(monkeypatch):
    for module in (versions, check_module):
        monkeypatch.setattr(module, "RENAMED_KEYS", RENAMED)


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_an_old_job_gets_the_new_names_and_keeps_its_comments(tmp_path, renamed):
    path = tmp_path / "job.yaml"
    path.write_text(OLD_JOB)
    result = run("migrate", str(path))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1:] == [
        "  line 19, train.num_steps: is now train.steps",
        "  line 15, task.longest: is now data.max_length",
        "  version: 1 was added",
    ]
    assert path.read_text() == NEW_JOB
    assert run("migrate", str(path)).output == f"{path}: nothing to change.\n"


def test_a_dry_run_writes_nothing(tmp_path, renamed):
    path = tmp_path / "job.yaml"
    path.write_text(OLD_JOB)
    result = run("migrate", str(path), "--dry-run")
    assert result.exit_code == 0 and "would change" in result.output
    assert path.read_text() == OLD_JOB


def test_a_job_with_a_mistake_is_left_alone(tmp_path, renamed):
    path = tmp_path / "job.yaml"
    path.write_text(OLD_JOB.replace("learning_rate", "lerning_rate"))
    before = path.read_text()
    result = run("migrate", str(path))
    assert result.exit_code == 2 and "Did you mean `learning_rate`" in result.output
    assert path.read_text() == before


@pytest.mark.parametrize("recipe", sorted((ROOT / "finetune" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_gets_its_version_and_no_other_change(recipe):
    text = recipe.read_text()
    migrated, changes = check_module.migrated(text)
    assert changes == ["version: 1 was added"]
    assert migrated.replace("version: 1\n", "", 1) == text
    assert check_module.migrated(migrated) == (migrated, [])


def test_check_against_a_run_lists_the_defaults_that_have_changed(tmp_path):
    path = write_job(tmp_path)
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    text = resolved_yaml(load_config(path))
    (folder / "resolved.yaml").write_text(text)
    assert run("check", str(path), "--against", str(folder)).output.endswith(f"since {folder}: none\n")
    assert "  keep_last: 2 " in text and "  steps: 8 " in text
    (folder / "resolved.yaml").write_text(
        text.replace("  keep_last: 2 ", "  keep_last: 5 ").replace("  steps: 8 ", "  steps: 9 ")
    )
    lines = run("check", str(path), "--against", str(folder)).output.splitlines()
    assert lines[-2:] == [f"defaults that have changed since {folder}:", "  checkpoint.keep_last: 5 then, 2 now"]


def test_check_against_a_folder_without_a_run_is_one_message(tmp_path):
    result = run("check", str(write_job(tmp_path)), "--against", str(tmp_path))
    assert result.exit_code == 2 and "resolved.yaml" in result.output


def test_the_command_line_prints_the_use_of_an_old_name_as_one_line(tmp_path):
    path = write_job(tmp_path, text=JOB.replace("  steps: 8", "  num_steps: 8"))
    program = (
        "from finetune.config.rules import versions\n"
        "versions.RENAMED_KEYS = (versions.RenamedKey('train.num_steps', 'train.steps', since='0.3'),)\n"
        "from finetune.cli.program import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "check", str(path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning[renamed-key]: job.yaml line ")
    assert "train.num_steps: is now train.steps; the old name works until 0.5" in line
