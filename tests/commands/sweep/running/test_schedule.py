"""Slots, signals and failures of the scheduler, with processes that only pretend."""

import io
import json
import signal
import time
from pathlib import Path

import pytest

from finetune.commands.sweep.plan.grid import SweepRun
from finetune.commands.sweep.plan.launch import LaunchPlan
from finetune.commands.sweep.running import schedule
from finetune.commands.sweep.running.process import StopSignals
from finetune.commands.sweep.running.schedule import GridSource, Scheduler
from finetune.commands.sweep.running.screen import PlainSweepScreen
from finetune.commands.sweep.state.book import SweepBook
from finetune.commands.sweep.state.record import SweepState, read_state
from finetune.config.load import load_config
from finetune.errors import UserError


class Pretended:
    """A run that ends after some polls, or when it is told to."""

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


@pytest.fixture
def scheduling(job, tmp_path, monkeypatch):
    """Return a function that schedules runs, and what it has started and printed."""
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.0)
    started, most = [], []

    def run(names, *, at_once=1, stop=None, load=None, on_start=None, **settings):
        runs = [SweepRun(name, {"run.seed": name}, (f"run.seed={name}",), tmp_path) for name in names]
        going = []

        def start(command, log, environment):
            process = Pretended(runs[len(started)].folder, polls=3, **settings)
            started.append((runs[len(started)].name, environment.get("CUDA_VISIBLE_DEVICES")))
            going.append(process)
            most.append(sum(each.polls > 0 and not each.signals for each in going))
            if on_start:
                on_start(len(started))
            return process

        plan = LaunchPlan(job, 1, None, at_once=at_once, devices=("0", "1", "2")[:at_once], num_cores=1)
        book = SweepBook(tmp_path, SweepState(str(job)))
        screen = PlainSweepScreen(io.StringIO(), num_runs=len(runs))
        load = load or (lambda run: load_config(job))
        scheduler = Scheduler(plan, book, screen, stop or StopSignals(), load, start=start)
        scheduler.run_all(GridSource(list(runs)))
        return [book.outcome(each).state for each in runs if each.name in book.state.runs], screen._file.getvalue()

    run.started, run.most = started, most
    return run


def test_no_more_runs_than_slots_and_each_has_its_device(scheduling, tmp_path):
    states, _ = scheduling("12345", at_once=2)
    assert states == ["finished"] * 5 and max(scheduling.most) == 2
    assert [name for name, _ in scheduling.started] == list("12345")
    assert {device for _, device in scheduling.started[:2]} == {"0", "1"}
    assert [record.exit_code for record in read_state(tmp_path).runs.values()] == [0] * 5


def test_a_signal_starts_no_further_run_and_lets_those_that_go_on_save(scheduling):
    stop = StopSignals()
    states, shown = scheduling("123", stop=stop, on_start=lambda _: stop._note(signal.SIGTERM, None))
    assert states == ["stopped"] and [name for name, _ in scheduling.started] == ["1"]
    assert "SIGTERM: 1 run will save and stop" in shown and "signal SIGTERM" in shown


def test_a_second_interrupt_is_urgent_and_a_second_sigterm_is_not():
    stop = StopSignals()
    stop._note(signal.SIGTERM, None)
    stop._note(signal.SIGTERM, None)
    assert not stop.is_urgent
    stop._note(signal.SIGINT, None)
    assert stop.is_urgent and stop.first is signal.SIGTERM


def test_a_job_that_was_changed_meanwhile_fails_its_runs_and_starts_none(scheduling):
    def changed(run):
        raise UserError("train.steps: `8` then, `9` now")

    states, shown = scheduling("12", load=changed)
    assert states == ["failed", "failed"] and scheduling.started == []
    assert "1: failed  (train.steps: `8` then, `9` now)" in shown


def test_a_run_that_is_killed_does_not_end_the_others(scheduling):
    states, shown = scheduling("12", state="running", code=-9)
    assert states == ["interrupted", "interrupted"]
    assert "killed by signal 9" in shown


def test_a_disk_that_is_full_ends_nothing(scheduling, monkeypatch, capsys):
    def full(folder: Path, state: SweepState) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finetune.commands.sweep.state.book.write_state", full)
    states, _ = scheduling("12")
    assert states == ["finished", "finished"]
    assert capsys.readouterr().err.count("No space left on device") == 1
