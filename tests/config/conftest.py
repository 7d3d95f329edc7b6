"""The small job, and what is said about it after changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.config.load import LoadedConfig, load_config
from finetune.errors import ConfigError, Problem


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
