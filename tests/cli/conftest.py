"""The command line as a user meets it: words in, exit code and text out."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from finetune.__main__ import main
from finetune.cli import after_training, app, before_training, checkpoint, verify

REAL = ("check_command", "init_command", "config_schema", "config_paths")
"""What is not replaced by stand-ins: it needs no torch."""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `finetune WORDS` in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `python WORDS` in a fresh process."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=60)

    return run


class StandIn:
    """Takes the place of a module that the command line imports lazily: notes calls of its functions."""

    def __init__(self, name: str, noted: SimpleNamespace) -> None:
        self._name = name
        self._noted = noted

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> Any:
            self._noted.made.append((f"{self._name}:{function}", arguments, named))
            return self._noted.answer

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the commands that need torch: note what would have been called, and return `answer`."""
    noted = SimpleNamespace(made=[], answer=0)
    replaced = 0
    for module in (app, after_training, before_training, checkpoint, verify):
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and name.endswith(("_command", "_data")) and name not in REAL:
                monkeypatch.setattr(module, name, StandIn(value.__name__, noted))
                replaced += 1
    assert replaced > 10
    return noted
