"""Slots, signals and failures of a sweep, with fake processes."""

import itertools
import json
import signal
import time

import pytest
from optuna.distributions import CategoricalDistribution

from finetune.commands.sweep import sweep
from finetune.commands.sweep.axes import value_text
from finetune.commands.sweep.launching import LOST_HOST, LaunchPlan, StopSignals
from finetune.commands.sweep.results import Objective
from finetune.commands.sweep.runs import SweepRun
from finetune.commands.sweep.study import SweepJournal, SweepStudy
from finetune.commands.sweep.sweep import MAX_LOST, SweepRequest, SweepSession
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

    def run(names, *, at_once=1, stop=None, load=None, on_start=None, codes=None, **settings):
        runs = [SweepRun(name, {"run.seed": name}, (f"run.seed={name}",), folder) for name in names]
        processes = []

        def start(command, log, environment):
            run = next(run for run in runs if run.log == log)
            code = {} if codes is None else {"code": next(codes)}
            process = FakeProcess(run.folder, polls=3, **settings, **code)
            started.append((run.name, environment.get("CUDA_VISIBLE_DEVICES")))
            processes.append(process)
            num_alive.append(sum(process.polls > 0 and not process.signals for process in processes))
            if on_start:
                on_start(len(started))
            return process

        plan = LaunchPlan(job, 1, None, at_once=at_once, devices=("0", "1", "2")[:at_once], num_cores=1)
        loaded, loss = load_config(job), Objective("loss", True)
        study = SweepStudy(folder, space=SPACE)
        study.begin(loaded.config, job=job, objective=loss)
        study.save()
        monkeypatch.setattr(sweep, "load_run", load or (lambda *_, **__: loaded))
        request = SweepRequest(job)
        session = SweepSession(request, plan, [], loss, study, runs, {}, stop or StopSignals(), start, kill=None)
        session.run_all(iter(runs), num_runs=len(runs))
        output, run.errors = capsys.readouterr()
        return [study.outcome(name).state for name in study.runs], output

    run.started, run.num_alive = started, num_alive
    return run


def test_only_as_many_runs_as_slots_are_active_and_each_gets_its_own_device(scheduling, folder):
    states, _ = scheduling("12345", at_once=2)
    assert states == ["finished"] * 5 and max(scheduling.num_alive) == 2
    assert [name for name, _ in scheduling.started] == list("12345")
    assert {device for _, device in scheduling.started[:2]} == {"0", "1"}
    assert [record.exit_code for record in SweepStudy(folder, space=SPACE).runs.values()] == [0] * 5


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
    assert "killed by signal 9" in shown


def test_a_run_whose_host_is_lost_is_started_again_before_the_others(scheduling):
    lost = iter([LOST_HOST, 0, 0])
    states, shown = scheduling("12", codes=lost)
    assert states == ["finished", "finished"] and "1: its host is lost; it is started again, and resumes" in shown
    assert len(scheduling.started) == 3


def test_a_run_that_loses_every_host_is_given_up(scheduling):
    states, shown = scheduling("1", state="running", codes=itertools.repeat(LOST_HOST))
    assert states == ["interrupted"] and "killed by signal 9" in shown
    assert len(scheduling.started) == MAX_LOST + 1


def test_a_full_disk_does_not_end_the_sweep_and_its_records_are_written_later(scheduling, folder, monkeypatch):
    write, num_failures = SweepJournal._write, []

    def write_to_full_disk(journal):
        if journal._is_saved and len(num_failures) < 3:
            num_failures.append(1)
            raise OSError(28, "No space left on device")
        write(journal)

    monkeypatch.setattr(SweepJournal, "_write", write_to_full_disk)
    states, _ = scheduling("12")
    assert states == ["finished", "finished"] and len(num_failures) == 3
    assert scheduling.errors.count("No space left on device") == 1
    assert [record.exit_code for record in SweepStudy(folder, space=SPACE).runs.values()] == [0, 0]
