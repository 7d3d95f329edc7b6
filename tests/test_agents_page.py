"""The page for agents names only commands that exist, its job loads, and `finetune agents` prints it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import finetune
from finetune.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = (Path(finetune.__file__).parent / "AGENTS.md").read_text(encoding="utf-8")


def test_the_command_prints_the_page():
    assert CliRunner().invoke(app, ["agents"]).output == PAGE


@pytest.mark.parametrize("file", ["docs/CHANGELOG.md", ".github/CITATION.cff"])
def test_the_version_of_the_package_stands_in_the_files_about_it(file):
    assert finetune.__version__ in (ROOT / file).read_text(encoding="utf-8")
