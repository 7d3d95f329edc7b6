"""Slots, signals and failures of a sweep, with fake processes."""

import json
import signal
import time

import pytest
from optuna.distributions import CategoricalDistribution

from finetune.commands.sweep import sweep
from finetune.commands.sweep.axes import value_text
from finetune.commands.sweep.launching import LaunchPlan, StopSignals
from finetune.commands.sweep.results import Objective
from finetune.commands.sweep.runs import SweepRun
from finetune.commands.sweep.study import SweepStudy
from finetune.commands.sweep.sweep import SweepRequest, SweepSession
from finetune.config.load import load_config
from finetune.errors import UserError


class FakeProcess:
    """A run that ends after some polls, or with the first signal."""

    def __init__(self, run_folder, *, polls, state="finished", code=0):
        self.pid, self.polls, self.signals = -1, polls, []
        self._folder, self._state, self._code = run_folder, state, code

    def poll(self):
        self.polls -= 1
        if self.polls > 0 and not self.signals:
            return None
        state, code = ("stopped", 143) if self.signals else (self._state, self._code)
        self._folder.mkdir(parents=True, exist_ok=True)
        status = {"state": state, "time": time.time() + 1, "reason": "signal SIGTERM", "step": 3, "num_steps": 8}
        (self._folder / "status.json").write_text(json.dumps(status))
        return code

    def send_signal(self, number):
        self.signals.append(number)


SPACE = {"run.seed": CategoricalDistribution([value_text(name) for name in "12345"])}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.fixture
def scheduling(job, folder, monkeypatch, capsys):
    """Return a function that schedules runs, and what it has started and printed."""
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.0)
    started, num_alive = [], []

    def run(names, *, at_once=1, stop=None, load=None, on_start=None, **settings):
        runs = [SweepRun(name, {"run.seed": name}, (f"run.seed={name}",), folder) for name in names]
        processes = []

        def start(command, log, environment):
            run = next(run for run in runs if run.log == log)
            process = FakeProcess(run.folder, polls=3, **settings)
            started.append((run.name, environment.get("CUDA_VISIBLE_DEVICES")))
            processes.append(process)
            num_alive.append(sum(process.polls > 0 and not process.signals for process in processes))
            if on_start:
                on_start(len(started))
            return process

        plan = LaunchPlan(job, 1, None, at_once=at_once, devices=("0", "1", "2")[:at_once], num_cores=1)
        loaded, loss = load_config(job), Objective("loss", True)
        study = SweepStudy(folder, space=SPACE)
        study.begin(loaded.config, objective=loss)
        monkeypatch.setattr(sweep, "load_run", load or (lambda *_, **__: loaded))
        request = SweepRequest(job)
        session = SweepSession(request, plan, [], loss, study, stop or StopSignals(), start)
        session.run_all(iter(runs))
        return [study.outcome(name).state for name in study.runs], capsys.readouterr().out

    run.started, run.num_alive = started, num_alive
    return run


def test_only_as_many_runs_as_slots_are_active_and_each_gets_its_own_device(scheduling, folder):
    states, _ = scheduling("12345", at_once=2)
    assert states == ["finished"] * 5 and max(scheduling.num_alive) == 2
    assert [name for name, _ in scheduling.started] == list("12345")
    assert {device for _, device in scheduling.started[:2]} == {"0", "1"}
    assert list(SweepStudy(folder, space=SPACE).runs) == list("12345")


def test_after_a_signal_no_run_is_started_and_active_runs_save(scheduling):
    stop = StopSignals()
    states, shown = scheduling("123", stop=stop, on_start=lambda _: stop.record(signal.SIGTERM))
    assert states == ["stopped"] and [name for name, _ in scheduling.started] == ["1"]
    assert "SIGTERM: 1 run will save and stop" in shown and "signal SIGTERM" in shown


def test_runs_of_a_job_that_was_edited_meanwhile_fail_without_starting(scheduling):
    def changed(*_, **__):
        raise UserError("train.steps: `8` then, `9` now")

    states, shown = scheduling("12", load=changed)
    assert states == ["failed", "failed"] and scheduling.started == []
    assert "1: failed  (train.steps: `8` then, `9` now)" in shown


def test_a_killed_run_does_not_end_the_others(scheduling):
    states, shown = scheduling("12", state="running", code=-9)
    assert states == ["interrupted", "interrupted"]
    assert "its process was killed" in shown
