"""`check --against` lists defaults that have changed; the use of an old name of a key is one line."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from tests.small_job import JOB, write_job

ROOT = Path(__file__).parents[2]


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
