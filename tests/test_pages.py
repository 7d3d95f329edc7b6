"""Every block, command, key, link and anchor of the README and of docs/ is checked against what is there.

A block says by its language what it is: a job or a part of one (yaml), commands (bash), python, json, toml; `text` is
neither. Other YAML files begin with a comment that names the file.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from typer.main import get_command

from finetune.cli.app import app
from finetune.commands.init.init import make_recipe, recipes
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.config.load import load_config
from finetune.config.schema import all_keys
from finetune.config.yaml import read_yaml
from finetune.runtime.gpus import prices_of
from tests import launching
from tests.plugin_tables import unload_plugins

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
WITH_BLOCKS = [README, ROOT / "finetune/AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""The pages whose blocks, commands and keys are checked."""

LINKED = [*WITH_BLOCKS, *(ROOT / ".github").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
"""The pages whose links are checked."""

BASE: dict[str, Any] = {
    "run": {"folder": "runs/page"},
    "model": {"name": "Qwen/Qwen3-0.6B"},
    "data": {"train": {"path": "rows.jsonl"}, "max_length": 512},
    "task": {"name": "sft"},
    "train": {"global_batch_size": 32, "microbatch_size": 4, "steps": 1000, "learning_rate": 1e-4},
}
"""What a part of a job is completed with."""

INSTEAD = {
    ("data", "train"): {"path", "name", "mix", "source"},
    ("data", "validation"): {"path", "name", "fraction", "hash_fraction"},
    ("model",): {"name", "from_config"},
    ("train",): {"steps", "epochs", "tokens"},
}
"""Keys of a section of which a job has one: the page's replaces the base's."""

OTHER_PROGRAMS = {"apptainer", "cd", "curl", "docker", "echo", "git", "hf", "llama-cli", "llama-quantize", "mkdocs"} | {
    *("mpirun", "mypy", "ollama", "printf", "pytest", "python3", "ruff", "srun", "vllm", ".")
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of the page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], dedent(found[3]))
        for found in re.finditer(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    ]


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages."""
    return [block for page in WITH_BLOCKS for block in blocks_of(page) if block.language in languages]


def prose(page: Path) -> str:
    """Return the text of the page without its blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_every_block_names_its_language():
    every = [block for page in WITH_BLOCKS for block in blocks_of(page)]
    assert len(every) > 130
    known = {"bash", "json", "python", "text", "toml", "yaml"}
    assert [str(block) for block in every if block.language not in known] == []
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in WITH_BLOCKS)
    assert fences == 2 * len(every)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_yaml_block_is_a_job_or_a_part_of_one(block, tmp_path, request):
    document = read_yaml(block.text)
    assert document.problems == []
    first = block.text.splitlines()[0]
    if first.startswith("# my-prices.yaml"):
        (tmp_path / "prices.yaml").write_text(block.text)
        assert all(prices_of(gpu, table=tmp_path / "prices.yaml") for gpu in document.values)
    elif first.startswith("# prometheus.yml"):
        assert list(document.values) == ["scrape_configs"]
    elif {"fsdp_config", "parallelism_config"} & set(document.values):
        shipped = read_yaml((ROOT / "accelerate_configs/fsdp2_sequence_parallel.yaml").read_text()).values
        assert all(set(keys) <= set(shipped[section]) for section, keys in document.values.items())
        (tmp_path / "file.yaml").write_text(json.dumps(merged(shipped, document.values)))
        assert read_accelerate_file(tmp_path / "file.yaml").distributed_type == "FSDP"
    else:
        request.addfinalizer(unload_plugins)
        before = [each for each in blocks_of(block.page) if each.language == "python" and each.line < block.line]
        job = merged(BASE, document.values)
        if "evaluate" in job or "validation" in job["data"]:
            job = merged({"evaluate": {}, "data": {"validation": {"fraction": 0.1}}}, job)
        if job["task"]["name"] == "image_classification":
            del job["data"]["max_length"]
        make_what_is_named(job, tmp_path)
        for plugin in job.get("plugins", []):
            (tmp_path / plugin).write_text(before[-1].text)
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        assert load_config(tmp_path / "job.yaml").config.task.name == job["task"]["name"]


def make_what_is_named(values: Any, folder: Path) -> None:
    """Make the files and folders of the job's relative paths."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, (dict, list)):
            make_what_is_named(value, folder)
        elif isinstance(value, str) and (value.startswith("./") or (key == "path" and ":" not in value)):
            place = folder / value
            (place.parent if place.suffix else place).mkdir(parents=True, exist_ok=True)
            if place.suffix:
                place.touch()


def merged(base: dict[str, Any], part: dict[str, Any], *above: str) -> dict[str, Any]:
    """Return the base with the values of the part, section by section."""
    instead = INSTEAD.get(above, set())
    base = {key: deepcopy(base[key]) for key in base if key not in instead or not instead & set(part)}
    for key, value in part.items():
        is_section = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = merged(base[key], value, *above, key) if is_section else value
    return base


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the commands of a shell text in words, without what they are redirected to."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if set(word) <= set("&|;<>"):
                if words and not words[0].startswith("="):
                    yield words
                words = ["="] if set(word) <= set("<>") else []
            elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                words.append(word)


@cache
def program() -> Any:
    """Return the command line, as click has it."""
    return get_command(app)


def check_command(words: list[str]) -> None:
    """Raise unless the program would accept these words."""
    words = [word for word in words if word != "..."]
    if words[0] == "finetune":
        check_finetune(words[1:])
    elif words[:2] == ["accelerate", "launch"]:
        launched = launch_command_parser().parse_args(words[2:])
        assert launched.module and launched.training_script == "finetune"
        file = Path(launched.config_file or "X.yaml").name
        assert file == "X.yaml" or (ROOT / "accelerate_configs" / file).is_file()
        check_finetune(launched.training_script_args)
    elif words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])
        assert launched.module and launched.training_script == "finetune"
        check_finetune(launched.training_script_args)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
        if words[2] == "finetune":
            check_finetune(words[3:])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file() or words[1].startswith("llama.cpp/")
    elif words[0] == "pip":
        extras = {name for word in words for found in re.findall(r"\[(.+)\]", word) for name in found.split(",")}
        assert extras <= set(EXTRAS) | {"dev"}
    else:
        assert words[0] in OTHER_PROGRAMS, f"{words[0]}: an unknown program"
        inner = [
            at
            for at, word in enumerate(words)
            if word in ("accelerate", "python") or words[at : at + 2] == ["finetune", "doctor"]
        ]
        if inner and words[0] in ("apptainer", "docker", "mpirun", "srun"):
            check_command(words[inner[0] :])


def check_finetune(words: list[str]) -> None:
    """Raise unless the command line can be parsed; without a command, it trains."""
    words = ["train", *words] if words[0].startswith("--") else list(words)
    command, name = program(), "finetune"
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"{name}: no command {words[:1]}"
        name = words.pop(0)
        command = command.commands[name]
    command.make_context(name, words)


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMANDS = [(f"{block} {' '.join(words)[:60]}", words) for block in blocks("bash") for words in commands_of(block.text)]


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[name for name, _ in COMMANDS])
def test_a_command_of_a_block_is_accepted(words):
    check_command(words)


def inline_commands() -> list[list[str]]:
    """Return the commands of ours within the sentences and tables of the pages, in words."""
    texts = [text for page in WITH_BLOCKS for text in re.findall(r"`(finetune [a-z][^`]+)`", prose(page))]
    return [words[1:] for text in texts for words in commands_of(text) if words[0] == "finetune"]


def test_every_command_in_a_sentence_exists_with_its_options():
    unknown = []
    for words in inline_commands():
        command, rest = program(), list(words)
        while hasattr(command, "commands") and rest:
            command = command.commands.get(rest.pop(0))
        known = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
        if command is None or {word for word in rest if word.startswith("--")} - known - {"--help"}:
            unknown.append(" ".join(words))
    assert len(inline_commands()) > 100
    assert unknown == []


def command_paths(command, *above: str) -> set[str]:
    """Return every command that can be typed, such as `verify parity`."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {" ".join(above)}
    return {path for name, each in inner.items() if not each.hidden for path in command_paths(each, *above, name)}


def test_every_command_is_on_the_page_of_commands():
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `finetune ([^`]+)` \|", page, re.MULTILINE)
    assert {path for path in command_paths(program()) if not any(row.startswith(path) for row in rows)} == set()


def test_every_key_in_a_sentence_exists():
    keys = {key for key, _ in all_keys()}
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    named = {
        (page.name, key)
        for page in WITH_BLOCKS
        for key in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_][a-z_.]*[a-z])(?=[`:=])", prose(page))
    }
    files = re.compile(r"\.(jsonl?|csv|ya?ml|txt|html|py|md|arrow|parquet|gguf)$")
    # Places in a JSON file, and modules of a model.
    others = {"data.items", "data.paragraphs.qas", "model.layers", "model.decoder.layers", "model.encoder.layers"}
    assert len(named) > 200
    assert sorted(f"{page}: {key}" for page, key in named if key not in keys | others and not files.search(key)) == []


@pytest.mark.parametrize("block", blocks("python", "json", "toml"), ids=str)
def test_a_block_of_python_json_or_toml_is_read_and_its_imports_are_there(block):
    if block.language == "json":
        rest = block.text.strip()
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()
    elif block.language == "toml":
        assert tomllib.loads(block.text)
    else:
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Import):
                assert all(importlib.util.find_spec(name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module and node.level == 0
                module = importlib.import_module(node.module)
                assert [
                    name.name
                    for name in node.names
                    if not hasattr(module, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}")
                ] == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().strip() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"https?:", link) and (
            not target.is_file() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target))
        ):
            broken.append(link)
    assert broken == []


def test_every_file_that_a_page_names_is_there():
    named = {
        (page.name, name)
        for page in WITH_BLOCKS
        for name in re.findall(
            r"`((?:accelerate_configs|benchmarks|docs|ds_configs|tests|\.ci|\.container)/[\w./*-]*)`", prose(page)
        )
    }
    assert len(named) > 20
    assert sorted(f"{page}: {name}" for page, name in named if not list(ROOT.glob(name.rstrip("/")))) == []


def test_every_page_and_command_that_the_package_names_is_there():
    paths = [path for path in (ROOT / "finetune").rglob("*") if path.suffix in (".py", ".yaml", ".jinja")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    pages = {(file, page) for file in texts for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md\b", texts[file])}
    assert len(pages) > 10
    assert sorted(f"{file}: {page}" for file, page in pages if not (ROOT / page).is_file()) == []
    commands = {
        (file, *words) for file in texts for words in re.findall(r"`finetune ([a-z-]+)(?: ([a-z-]+))?", texts[file])
    }
    groups = {name: getattr(each, "commands", None) for name, each in program().commands.items()}
    assert len(commands) > 50
    assert (
        sorted(
            f"{file}: finetune {first} {second}"
            for file, first, second in commands
            if first not in groups or (groups[first] and second and second not in groups[first])
        )
        == []
    )


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("material", reason="mkdocs-material (the extra `docs`) is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config as load_site

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_site(str(ROOT / ".github/site/mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    own = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in WITH_BLOCKS[2:]}
    assert len(own) > 40 and own <= pages
    loaded = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', (tmp_path / "site/index.html").read_text()
    )
    assert loaded == []


@pytest.mark.parametrize(
    "name", ["HF_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "DEVICE", "EXTRAS", "/cache", "/workspace"]
)
def test_image_facts_on_the_clusters_page_are_in_the_dockerfile(name):
    page = (ROOT / "docs/how-to/clusters.md").read_text(encoding="utf-8")
    assert name in page and name in (ROOT / ".container/Dockerfile").read_text()


def test_the_table_of_strategies_is_the_folder():
    page = (ROOT / "docs/how-to/several-gpus.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(re.findall(r"^\| `(\w+\.yaml)` \|", page, re.MULTILINE)) == {
        name for name in files if not name.startswith("multi_node")
    }


def test_the_table_of_extras_is_that_of_the_package():
    page = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page.split("| extra,")[1], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(EXTRAS)


def test_every_symptom_on_the_page_of_errors_is_a_message_of_the_package():
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    symptoms = [re.sub(r" N .*", "", quoted) for quoted in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "finetune").rglob("*.py"))
    assert len(symptoms) > 15
    assert [symptom for symptom in symptoms if symptom not in source] == []


def test_the_readme_has_at_most_9_kb_and_two_commands_that_set_up_a_fresh_machine(tmp_path):
    assert README.stat().st_size <= 9 * 1024
    first, tests = (block.text for block in blocks_of(README)[:2])
    assert all(
        text.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -e ") for text in (first, tests)
    )
    assert "-m finetune --config quickstart/job.yaml" in first and tests.endswith("&& pytest\n")
    assert "init quickstart --into quickstart" in first and "quickstart" in recipes()
    config = load_config(make_recipe("quickstart", tmp_path / "quickstart")[0]).config
    assert Path(config.run.folder).relative_to(tmp_path).as_posix() in README.read_text(encoding="utf-8")


def test_a_job_file_that_is_explained_line_by_line_has_a_comment_on_every_line_with_a_value():
    (block,) = [block for block in blocks_of(ROOT / "docs/reference/job-file.md") if block.language == "yaml"]
    assert [line for line in block.text.splitlines() if re.search(r":\s*[^\s#]", line) and "  # " not in line] == []


def test_the_table_of_other_programs_holds_for_the_installed_trainer_and_trl():
    transformers = importlib.import_module("transformers")
    trl = pytest.importorskip("trl")
    fields = trl.SFTConfig.__dataclass_fields__
    assert (fields["max_length"].default, fields["packing"].default, fields["padding_free"].default) == (
        1024,
        False,
        False,
    )
    assert trl.GRPOTrainer and trl.RLOOTrainer and transformers.DataCollatorWithFlattening
    parse = importlib.import_module("trl.scripts.utils").TrlParser.parse_args_and_config
    assert inspect.signature(parse).parameters["fail_with_unknown_args"].default is True
    assert "per_device_train_batch_size" in transformers.TrainingArguments.__dataclass_fields__
    with pytest.raises(TypeError, match="learning_rat"):
        transformers.TrainingArguments(output_dir="x", learning_rat=1e-4)


SMALL_MODEL = """
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 320}}
"""
"""What the tutorial's model is replaced by, since tests have no network."""


@pytest.mark.full
def test_the_tutorial_on_own_rows_goes_from_a_csv_to_an_answer_as_it_is_written(tmp_path):
    page = ROOT / "docs/start/your-data.md"
    job, *_ = (block.text for block in blocks_of(page) if block.language == "yaml")
    job = re.sub(r"^model:\n(  .*\n)+", SMALL_MODEL, job, flags=re.MULTILINE)
    job = job.replace("max_length: 1024", "max_length: 128\n  chat_template: chatml")
    (tmp_path / "job.yaml").write_text(job.replace("epochs: 3", "epochs: 1"))
    words = ["red", "green", "blue", "amber", "violet", "white", "black", "grey"]
    rows = [f"Reverse: {first} {second},{second} {first}" for first in words for second in words]
    (tmp_path / "questions.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Reverse: red blue"}\n')
    environment = {**os.environ, **launching.SETTINGS, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for block in blocks_of(page):
        if block.language == "bash":
            ended = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"
            printed += ended.stdout
    assert "columns: {prompt: question, completion: answer}" in printed
    assert json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    assert (tmp_path / "runs/first/report.html").is_file() and (tmp_path / "runs/first/final").is_dir()
