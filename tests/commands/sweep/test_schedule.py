"""Slots, signals and failures of the scheduler, with fake processes."""

import io
import json
import signal
import time

import pytest

from finetune.commands.sweep import schedule
from finetune.commands.sweep.axes import Choices
from finetune.commands.sweep.journal import SweepJournal
from finetune.commands.sweep.launch import LaunchPlan
from finetune.commands.sweep.results import Objective
from finetune.commands.sweep.runs import SweepRun
from finetune.commands.sweep.schedule import Scheduler, StopSignals
from finetune.commands.sweep.screen import SweepScreen
from finetune.commands.sweep.study import SweepStudy
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


SPACE = {"run.seed": Choices(tuple("12345"))}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.fixture
def scheduling(job, folder, monkeypatch):
    """Return a function that schedules runs, and what it has started and printed."""
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.0)
    started, num_alive = [], []

    def run(names, *, at_once=1, stop=None, load=None, on_start=None, **settings):
        runs = [SweepRun(name, {"run.seed": name}, (f"run.seed={name}",), folder) for name in names]
        processes = []

        def start(command, log, environment):
            process = FakeProcess(runs[len(started)].folder, polls=3, **settings)
            started.append((runs[len(started)].name, environment.get("CUDA_VISIBLE_DEVICES")))
            processes.append(process)
            num_alive.append(sum(process.polls > 0 and not process.signals for process in processes))
            if on_start:
                on_start(len(started))
            return process

        plan = LaunchPlan(job, 1, None, at_once=at_once, devices=("0", "1", "2")[:at_once], num_cores=1)
        loaded = load_config(job)
        study = SweepStudy(folder, space=SPACE)
        study.begin(loaded.config, swept=list(SPACE), job=job, objective=Objective("loss", True))
        study.save()
        screen = SweepScreen(io.StringIO(), num_runs=len(runs))
        waiting = iter(runs)
        scheduler = Scheduler(
            plan=plan,
            study=study,
            screen=screen,
            stop=stop or StopSignals(),
            load=load or (lambda run: loaded),
            next_run=lambda: next(waiting, None),
            after_run=lambda: None,
            start=start,
        )
        scheduler.run_all()
        return [study.outcome(name).state for name in study.runs], screen._file.getvalue()

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
    states, shown = scheduling("123", stop=stop, on_start=lambda _: stop._record(signal.SIGTERM, None))
    assert states == ["stopped"] and [name for name, _ in scheduling.started] == ["1"]
    assert "SIGTERM: 1 run will save and stop" in shown and "signal SIGTERM" in shown


def test_a_second_sigint_kills_and_a_second_sigterm_does_not():
    stop = StopSignals()
    stop._record(signal.SIGTERM, None)
    stop._record(signal.SIGTERM, None)
    assert not stop.is_urgent
    stop._record(signal.SIGINT, None)
    assert stop.is_urgent and stop.first is signal.SIGTERM


def test_runs_of_a_job_that_was_edited_meanwhile_fail_without_starting(scheduling):
    def changed(run):
        raise UserError("train.steps: `8` then, `9` now")

    states, shown = scheduling("12", load=changed)
    assert states == ["failed", "failed"] and scheduling.started == []
    assert "1: failed  (train.steps: `8` then, `9` now)" in shown


def test_a_killed_run_does_not_end_the_others(scheduling):
    states, shown = scheduling("12", state="running", code=-9)
    assert states == ["interrupted", "interrupted"]
    assert "killed by signal 9" in shown


def test_a_full_disk_does_not_end_the_sweep_and_its_records_are_written_later(scheduling, folder, monkeypatch, capsys):
    write, num_failures = SweepJournal._write, []

    def write_to_full_disk(journal):
        if journal._is_saved and len(num_failures) < 3:
            num_failures.append(1)
            raise OSError(28, "No space left on device")
        write(journal)

    monkeypatch.setattr(SweepJournal, "_write", write_to_full_disk)
    states, _ = scheduling("12")
    assert states == ["finished", "finished"] and len(num_failures) == 3
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert [record.exit_code for record in SweepStudy(folder, space=SPACE).runs.values()] == [0, 0]
