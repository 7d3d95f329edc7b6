"""docs/how-to/clusters.md names only keys, commands, options and files that exist."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from finetune.cli.app import app
from finetune.config.schema import all_keys

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
SECTIONS = ("run", "model", "data", "task", "train", "checkpoint", "evaluate", "report", "export")
COMMANDS = re.findall(r"\bfinetune ((?:launch [a-z]+|train|doctor|check|sweep|verify \w+))([^`\n|]*)", PAGE)


def test_every_key_exists():
    keys = {key for key, _ in all_keys()}
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_][a-z_.]*[a-z])\b(?!\.[a-z])", PAGE)
    assert len(set(named)) >= 15
    assert sorted({key for key in named if key not in keys}) == []


def test_every_command_and_its_options_exist():
    assert len(COMMANDS) >= 4
    for words, rest in COMMANDS:
        command = get_command(app)
        for word in words.split():
            assert word in command.commands, words
            command = command.commands[word]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {option for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest) if option not in known} == set(), words


def test_every_file_exists():
    files = set(re.findall(r"\b((?:accelerate_configs|ds_configs|docs)/[\w.-]+|\.container/[\w.]+)", PAGE))
    linked = {f"docs/how-to/{link}" for link in re.findall(r"\]\(([^)#:]+)\)", PAGE)}
    assert len(files) >= 8 and linked
    assert sorted(file for file in files | linked if not (ROOT / file).exists()) == []


@pytest.mark.parametrize(
    "name", ["HF_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "DEVICE", "EXTRAS", "/cache", "/workspace"]
)
def test_image_facts_on_the_clusters_page_are_in_the_dockerfile(name):
    assert name in PAGE and name in (ROOT / ".container" / "Dockerfile").read_text()
