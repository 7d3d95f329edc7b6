from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.commands.init import recipes


def test_without_a_name_the_recipes_are_listed():
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(recipes())


def test_a_recipe_is_written_and_its_files_named(tmp_path):
    result = CliRunner().invoke(app, ["init", "quickstart", "--into", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"wrote {tmp_path / 'job.yaml'}"
    assert (tmp_path / "held_out.jsonl").is_file()


def test_a_folder_of_the_recipes_name_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "sft-lora"]).exit_code == 0
    assert (tmp_path / "sft-lora" / "job.yaml").is_file()


def test_an_unknown_recipe_is_a_users_mistake(tmp_path):
    result = CliRunner().invoke(app, ["init", "quikstart", "--into", str(tmp_path)])
    assert result.exit_code == 2
    assert "Unknown recipe `quikstart`" in result.output
