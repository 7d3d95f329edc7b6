import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.commands.init.init import recipes
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.registry.accelerate_files import accelerate_file_names


def test_without_a_name_the_recipes_are_listed():
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(recipes())


def test_a_recipe_is_written_and_its_files_named(tmp_path):
    result = CliRunner().invoke(app, ["init", "quickstart", "--into", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"wrote {tmp_path / 'job.yaml'}"
    assert (tmp_path / "held_out.jsonl").is_file()
    assert result.stdout.splitlines()[-1] == f"start with: finetune train --config {tmp_path / 'job.yaml'}"


def test_a_folder_of_the_recipes_name_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "sft-lora"]).exit_code == 0
    assert (tmp_path / "sft-lora" / "job.yaml").is_file()


def test_a_strategy_writes_an_accelerate_file_whose_deepspeed_config_lies_next_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", "quickstart", "--strategy", "zero2"])
    assert result.exit_code == 0
    assert (
        "start with: finetune train --config quickstart/job.yaml --accelerate quickstart/zero2.yaml --processes 2"
        in result.stdout
    )
    assert "deepspeed_config_file: zero2.json" in (tmp_path / "quickstart" / "zero2.yaml").read_text()
    assert json.loads((tmp_path / "quickstart" / "zero2.json").read_text())["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("strategy", accelerate_file_names())
def test_every_strategy_can_be_written_without_a_recipe_and_launched_from_another_folder(
    tmp_path, monkeypatch, strategy
):
    assert CliRunner().invoke(app, ["init", "--strategy", strategy, "--into", str(tmp_path / "project")]).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    values = read_accelerate_file(tmp_path / "project" / f"{strategy}.yaml").values
    named = values.get("deepspeed_config", {}).get("deepspeed_config_file")
    assert (named is not None) == ("zero" in strategy)
    assert named is None or Path(named).parent == tmp_path / "project"


def test_an_unknown_strategy_is_a_users_mistake(tmp_path):
    result = CliRunner().invoke(app, ["init", "quickstart", "--strategy", "zero4", "--into", str(tmp_path)])
    assert result.exit_code == 2
    assert "--strategy zero4: choose one of ddp" in result.output
    assert list(tmp_path.iterdir()) == []
