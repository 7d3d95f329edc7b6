"""The command line as a user meets it: words in, exit code and text out."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from finetune.__main__ import main


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
