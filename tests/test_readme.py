"""What the README says is so: its files are there, its commands exist, its job files load."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from finetune.cli.app import app
from finetune.commands.init.init import make_recipe, recipes
from finetune.config.load import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return every command of the README in words: of its shell blocks and of its inline code."""
    shell = " && ".join(block.replace("\\\n", " ").strip() for block in blocks("bash"))
    inline = re.findall(r"`((?:finetune|accelerate launch|pip install) [^`]+)`", README)
    return [shlex.split(line) for line in [*re.split(r"&&|\||\n", shell), *inline] if line.strip()]


def finetune_commands() -> list[list[str]]:
    """Return the words behind `finetune` of every command of ours."""
    return [words[1:] for words in commands() if words[0] == "finetune"]


def command_paths(command, *above: str) -> set[str]:
    """Return every command that can be typed, such as `verify parity`."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {" ".join(above)}
    return {path for name, each in inner.items() if not each.hidden for path in command_paths(each, *above, name)}


def test_every_linked_or_named_file_is_there():
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    named = re.findall(r"`((?:accelerate_configs|ds_configs|docs|finetune)/[\w./*-]*)`", README)
    assert len(linked) >= 5 and len(named) >= 3
    assert [name for name in {*linked, *named} if not list(ROOT.glob(name.rstrip("/")))] == []


def test_the_table_of_strategies_is_the_folder():
    told = set(re.findall(r"^\| `(\w+\.yaml)` \|", README, re.MULTILINE))
    there = {
        path.name for path in (ROOT / "accelerate_configs").glob("*.yaml") if not path.name.startswith("multi_node")
    }
    assert len(there) == 12
    assert told == there


def test_every_symptom_quoted_in_the_readme_is_a_message_of_the_package():
    table = README.split("\n## When it fails\n")[1].split("\n## ")[0]
    symptoms = [re.sub(r" N .*", "", quoted) for quoted in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "finetune").rglob("*.py"))
    assert len(symptoms) >= 6
    assert [symptom for symptom in symptoms if symptom not in source] == []


def test_every_command_of_the_readme_exists():
    there = command_paths(get_command(app))
    typed = finetune_commands()
    assert len(typed) >= 6
    for words in typed:
        assert any(" ".join(words).startswith(path) for path in there), words


def test_every_command_is_in_the_readme():
    typed = {" ".join(words) for words in finetune_commands()}
    missing = {path for path in command_paths(get_command(app)) if not any(line.startswith(path) for line in typed)}
    assert missing == set()


def test_the_accelerate_files_of_the_launch_lines_are_there():
    launched = [words for words in commands() if words[:2] == ["accelerate", "launch"]]
    configs = [words[words.index("--config_file") + 1] for words in launched]
    assert len(configs) >= 3
    assert [config for config in configs if config != "X.yaml" and not (ROOT / config).is_file()] == []


def test_the_recipe_of_the_first_command_exists():
    (name,) = {words[1] for words in finetune_commands() if words[0] == "init" and "quickstart" in words[1:2]}
    assert name in recipes()


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_a_job_file_of_the_readme_loads(tmp_path, number):
    (tmp_path / "job.yaml").write_text(blocks("yaml")[number])
    for file in ("train.jsonl", "validation.jsonl"):
        (tmp_path / file).write_text('{"question": "a", "answer": "b"}\n')
    config = load_config(tmp_path / "job.yaml").config
    assert config.run.folder == str(tmp_path / "runs" / "support-bot")


def test_the_job_file_of_the_readme_has_a_comment_on_every_line_with_a_value():
    (text,) = blocks("yaml")
    bare = [line for line in text.splitlines() if re.search(r":\s*[^\s#]", line) and "  # " not in line]
    assert bare == []


def test_the_quickstart_folder_of_the_readme_is_where_the_quickstart_runs(tmp_path):
    folder = tmp_path / "quickstart"
    config = load_config(make_recipe("quickstart", folder)[0]).config
    assert Path(config.run.folder).relative_to(tmp_path).as_posix() in README
