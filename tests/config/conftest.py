"""A small job file that keeps every rule, and what is said about it after changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.config.load import LoadedConfig, load_config
from finetune.errors import ConfigError, Problem

JOB = """\
run:
  folder: runs/first
model:
  name: gpt2
data:
  train:
    path: rows.jsonl
  max_length: 64
task:
  name: sft
train:
  global_batch_size: 8
  microbatch_size: 4
  steps: 10
  learning_rate: 1e-4
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the path of the small job; its rows lie beside it."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def load(job: Path) -> Callable[..., LoadedConfig]:
    """Return a function that loads the small job with overrides, or another text in its place."""

    def load_it(*overrides: str, text: str | None = None) -> LoadedConfig:
        if text is not None:
            job.write_text(text)
        return load_config(job, overrides)

    return load_it


@pytest.fixture
def problems(load: Callable[..., LoadedConfig]) -> Callable[..., list[Problem]]:
    """Return a function that loads likewise and returns the problems."""

    def find(*overrides: str, text: str | None = None) -> list[Problem]:
        try:
            load(*overrides, text=text)
        except ConfigError as error:
            return list(error.problems)
        return []

    return find


@pytest.fixture
def complaints(problems: Callable[..., list[Problem]]) -> Callable[..., list[str]]:
    """Return a function that loads likewise and returns the problems, one line of text each."""

    def complain(*overrides: str, text: str | None = None) -> list[str]:
        return [str(problem) for problem in problems(*overrides, text=text)]

    return complain
