"""The options of `finetune sweep` become one request, and mistakes one message."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.cli import launch as words
from finetune.commands.sweep.sweep import SweepRequest


@pytest.fixture
def requests(monkeypatch):
    """Replace the command; return the requests that it was given."""
    made = []
    command = SimpleNamespace(sweep=made.append, SweepRequest=SweepRequest)
    monkeypatch.setattr(words, "sweep_command", command)
    return made


def test_the_options_of_sweep_become_one_request(typed, requests):
    options = ["--processes-per-run", 2, "--folder", "s", "--at-once", 3, "--search", 20, "--retry-failed"]
    code, _, _ = typed("sweep", "--config", "job.yaml", "--set", "run.seed=1,2", "--set", "train.steps=4", *options)
    (made,) = requests
    assert code == 0
    assert (made.config, made.override, made.folder) == (Path("job.yaml"), ("run.seed=1,2", "train.steps=4"), Path("s"))
    assert (made.processes_per_run, made.at_once, made.search) == (2, 3, 20)
    assert made.retry_failed and not made.dry_run


def test_mistakes_in_the_options_of_sweep_are_one_message(typed, job):
    code, out, err = typed("sweep", "--config", job, "--set", "train.steps=1,1", "--set", "run.folder=x")
    assert (code, out) == (2, "")
    assert err.startswith("error: the sweep has 2 problems\n") and "Traceback" not in err


def test_a_dry_run_of_a_sweep_prints_every_run(typed, job, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, _ = typed("sweep", "--config", job, "--set", "run.seed=1,2", "--dry-run")
    assert code == 0
    assert out.startswith("2 runs, 1 at once, in ") and "\nseed=1: waiting\n" in out and "\nseed=2: waiting\n" in out


def test_a_sweep_without_optuna_is_one_message(typed, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    code, out, err = typed("sweep", "--config", job, "--set", "run.seed=1,2", "--dry-run")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "pip install 'finetune-accelerate[sweep]'" in err
