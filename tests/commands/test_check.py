"""`check --against` lists defaults that have changed."""

from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from tests.small_job import write_job


def run(*words: str):
    return CliRunner().invoke(app, list(words))


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
