"""The page for agents names only commands that exist, its job loads, and `finetune agents` prints it."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import finetune
from finetune.cli.app import app
from finetune.config.load import load_config

ROOT = Path(__file__).parents[1]
PAGE = (Path(finetune.__file__).parent / "AGENTS.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words and words[0] == "finetune"]


def test_the_command_prints_the_page():
    assert CliRunner().invoke(app, ["agents"]).output == PAGE


def test_every_command_and_option_of_the_page_exists():
    assert len(commands()) > 12
    for words in commands():
        command = get_command(app)
        path = list(words[1:])
        while hasattr(command, "commands"):
            command = command.commands[path.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in path if word.startswith("--")} <= known, words


def test_the_job_of_the_page_loads(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert load_config(tmp_path / "job.yaml").config.version == 1


@pytest.mark.parametrize("file", ["docs/CHANGELOG.md", ".github/CITATION.cff"])
def test_the_version_of_the_package_stands_in_the_files_about_it(file):
    assert finetune.__version__ in (ROOT / file).read_text(encoding="utf-8")
