"""Sweeps of a tiny job for real: results, failures, further values, a killed run, a killed sweep."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune.commands.sweep.study import SweepStudy
from finetune.commands.sweep.sweep import SweepRequest, sweep
from finetune.commands.verify.runs import read_completed_run, run_differences
from finetune.errors import UserError
from finetune.report.history import read_events
from finetune.runtime.run_folder import is_locked
from tests import launching
from tests.scenarios.conftest import job  # noqa: F401  # the tiny job, which trains in a second

RATES = "train.learning_rate=1e-2,2e-2"
STEPS = 160
LONG = (f"train.steps={STEPS}", "checkpoint.every_steps=20", "evaluate.every_steps=80")
ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 300.0


@pytest.fixture(autouse=True)
def without_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def warm(command, log, environment):
    """Start a run as a fork of the warm server, which ends with its client."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return launching.begin(command, output=output, environment={**environment, "OMP_NUM_THREADS": "1"})


def run(job, folder, *overrides, **settings):  # noqa: F811
    return sweep(SweepRequest(job, tuple(overrides), folder=folder, **settings), start=warm)


def started(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if ": started, log in " in line]


def events(run_folder, name):
    return [event for event in read_events(run_folder / "events.jsonl") if event["event"] == name]


def test_a_sweep_with_an_invalid_setting_starts_no_run(job, tmp_path):  # noqa: F811
    folder = tmp_path / "sweep"
    for overrides, settings, message in [
        (["train.learning_rate=1e-2,-1"], {}, "`-1` is not allowed"),
        (["run.seed=1..9"], {}, "a range needs --search N"),
        ([RATES], {"metric": "rouge"}, "no evaluation of the job measures it"),
        ([RATES], {"processes_per_run": 3}, "cannot be shared by 3 processes"),
    ]:
        with pytest.raises(UserError, match=message):
            run(job, folder, *overrides, **settings)
    assert not folder.exists()


def test_a_dry_run_prints_the_commands_and_writes_nothing(job, tmp_path, capsys):  # noqa: F811
    assert run(job, tmp_path / "sweep", RATES, dry_run=True, processes_per_run=2) == 0
    shown = capsys.readouterr().out
    assert "2 runs, 1 at once" in shown and "--nproc_per_node=2" in shown and "--set train.learning_rate=0.02" in shown
    assert not (tmp_path / "sweep").exists()


@pytest.mark.full
@pytest.mark.distributed
def test_a_failing_run_ends_no_other_and_further_values_add_runs(job, tmp_path, capsys, monkeypatch):  # noqa: F811
    folder = tmp_path / "sweep"
    monkeypatch.setenv("FINETUNE_FAULTS", "")
    broken = "model.lora=null,{rank: 4, alpha: 8.0, target_modules: [no_such_module]}"
    assert run(job, folder, broken, at_once=2) == 1
    first = capsys.readouterr().out
    assert "failed" in first and "no_such_module" in first and "best: lora=null" in first
    assert run(job, folder, broken) == 1  # nothing is due: one is finished, and one waits for --retry-failed
    assert started(capsys) == []
    assert run(job, folder, broken, retry_failed=True) == 1
    assert len(started(capsys)) == 1
    wider = [broken.replace("null,", "null,{rank: 2, alpha: 4.0},")]
    assert run(job, folder, *wider) == 1
    table = capsys.readouterr().out.partition("status")[2]
    assert table.count(" finished") == 2 and table.count("8/8") == 2 and " failed: " in table
    with pytest.raises(UserError, match=r"train.steps: `8` then, `9` now"):
        run(job, folder, *wider, "train.steps=9")
    assert run(job, folder, *wider, "report.log_every_steps=2") == 1  # it may differ on a resume


def begin_cold(job, folder, *overrides, at_once=1):  # noqa: F811
    words = [word for text in overrides for word in ("--set", text)]
    command = [sys.executable, "-m", "finetune", "sweep", "--config", str(job), "--folder", str(folder)]
    with (job.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen([*command, *words, "--at-once", str(at_once)], stdout=log, stderr=log, cwd=ROOT)


def until(is_so):
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_in_the_middle(run_folder):
    path = run_folder / "events.jsonl"
    return (
        path.exists() and is_locked(run_folder) and any(event["step"] > 25 for event in events(run_folder, "StepTaken"))
    )


def processes_of(folder):
    pids = []
    for process in psutil.process_iter():
        try:
            pids += [process.pid] if str(folder / "runs") in " ".join(process.cmdline()) else []
        except psutil.Error:
            continue
    return pids


@pytest.mark.full
@pytest.mark.distributed
def test_a_killed_sweep_leaves_no_orphan_and_ends_as_an_undisturbed_one(job, tmp_path):  # noqa: F811
    """SIGKILL of the sweep, then of a run, then SIGTERM of the sweep; every step once, but those since a checkpoint."""
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    assert run(job, straight, RATES, *LONG) == 0
    names = list(SweepStudy(straight, space={}).runs)
    first, second = (folder / "runs" / name for name in names)

    process = begin_cold(job, folder, RATES, *LONG)
    until(lambda: is_in_the_middle(first))
    process.kill()
    process.wait()
    until(lambda: not processes_of(folder))
    assert json.loads((first / "status.json").read_text())["reason"] == "signal SIGTERM"

    process = begin_cold(job, folder, RATES, *LONG)
    until(lambda: is_in_the_middle(second))
    os.kill(json.loads((second / "status.json").read_text())["pid"], signal.SIGKILL)
    assert process.wait() == 1  # the first run has ended, and the second is to be continued

    assert run(job, folder, RATES, *LONG) == 0
    for name in names:
        same, other = read_completed_run(straight / "runs" / name), read_completed_run(folder / "runs" / name)
        assert list(run_differences(same, other, stop_at=other.starts[-1], tolerance=None)) == []
        assert len(other.steps) == STEPS
    taken = [event["step"] for event in events(first, "StepTaken")]
    assert taken == list(range(1, STEPS + 1))  # saved when the sweep was killed: no step was taken twice
    assert len(events(first, "RunStarted")) == len(events(second, "RunStarted")) == 2
