"""The steps of CONTRIBUTING.md are taken: its code runs, its files are there."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.report import ReportSection
from finetune.config.sections.task import TaskSection
from finetune.data.sources import readers
from finetune.model.processing import train_or_load_tokenizer
from finetune.registry.tasks import TASKS
from finetune.report.events import Evaluated, RunStarted
from finetune.report.trackers import TrackerReporter
from finetune.task.protocol import TaskContext, build_task

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")


def python_of(title: str) -> dict:
    """Return the names that the code block of a chapter defines."""
    chapter = GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^ *```python\n(.*?)```", chapter, re.DOTALL | re.MULTILINE)
    names = {"__name__": "contributed"}
    exec(compile(dedent(block), title, "exec"), names)
    return names


def test_every_file_and_folder_that_is_named_is_there():
    named = set(re.findall(r"`((?:finetune|tests|docs|\.ci)/[\w./-]+)`", GUIDE)) | {"pyproject.toml"}
    assert len(named) >= 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_documented_example_task_trains_only_the_last_sentence(tmp_path, monkeypatch):
    task_class = python_of("Add a task")["LastSentenceTask"]
    module = ModuleType("contributed")
    module.LastSentenceTask = task_class
    monkeypatch.setitem(sys.modules, "contributed", module)
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    TASKS.register(replace(TASKS["pretrain"], name="last_sentence", implementation="contributed:LastSentenceTask"))
    tokenizer = train_or_load_tokenizer(
        lambda: ["a. b."], vocabulary_size=300, cache_folder=tmp_path, log=lambda _: None
    )
    data = DataSection(train=TrainingSourceSection(path="/nowhere.jsonl"), max_length=64)
    task = build_task(TaskContext(TaskSection(name="last_sentence"), data, tokenizer))
    (features,) = task.samples.encode([{"text": "A star. The moon."}])
    ids, is_target = (features.arrays[name] for name in ("input_ids", "is_target"))
    assert tokenizer.decode(ids[is_target].tolist(), skip_special_tokens=True).strip(" .") == "The moon"
    assert task.collate([features]).num_targets == is_target.sum()
    assert task.encode_row({"text": ""}) is None


def test_the_schema_names_the_tasks_of_the_registry():
    assert tuple(TaskSection.model_json_schema()["properties"]["name"]["enum"]) == TASKS.choices


def test_the_source_that_is_added_gives_rows_that_know_their_place(tmp_path, monkeypatch):
    monkeypatch.setitem(readers._TEXTS, ".fortune", python_of("Add a source")["sections"])
    (tmp_path / "sayings.fortune").write_text("a star\n%\nthe moon\nand more\n")
    with (tmp_path / "sayings.fortune").open("rb") as stream:
        rows = list(readers.rows_of(stream, ".fortune", origin="sayings.fortune"))
    assert [(row.number, row.parse()) for row in rows] == [(1, {"text": "a star"}), (3, {"text": "the moon\nand more"})]
    assert rows[1].location.endswith("sayings.fortune, row 3")


@pytest.fixture
def registered(monkeypatch):
    """Forget after the test what it registers with Accelerate."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


@pytest.mark.usefixtures("registered")
def test_the_documented_example_tracker_gets_metrics(tmp_path):
    python_of("Add a tracker")
    section = ReportSection(trackers=("lines",), project="stories")
    reporter = TrackerReporter("lines", section, run_folder=tmp_path)
    reporter(RunStarted(0, num_steps=2, strategy="single", arithmetic=(), config={}))
    reporter(Evaluated(2, metrics={"loss": 0.5}, num_rows=4, seconds=0.1))
    reporter.close()
    assert (tmp_path / "trackers" / "stories.txt").read_text() == "2 {'evaluation/loss': 0.5}\n"
