"""Devices and threads of each run; slots, signals and failures of the scheduler, with fake processes."""

import io
import itertools
import json
import signal
import time
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution

from finetune.commands.sweep import schedule
from finetune.commands.sweep.axes import value_text
from finetune.commands.sweep.results import Objective
from finetune.commands.sweep.runs import SweepRun
from finetune.commands.sweep.schedule import (
    LOST_HOST,
    MAX_LOST,
    HostResources,
    LaunchPlan,
    Scheduler,
    StopSignals,
    SweepScreen,
    plan_launch,
    visible_devices,
)
from finetune.commands.sweep.study import SweepJournal, SweepStudy
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
def scheduling(job, folder, monkeypatch):
    """Return a function that schedules runs, and what it has started and printed."""
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.0)
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
        loaded = load_config(job)
        study = SweepStudy(folder, space=SPACE)
        study.begin(loaded.config, swept=list(SPACE), job=job, objective=Objective("loss", True))
        study.save()
        screen = SweepScreen(io.StringIO(), num_runs=len(runs))
        scheduler = Scheduler(
            plan=plan,
            study=study,
            screen=screen,
            stop=stop or StopSignals(),
            load=load or (lambda run: loaded),
            runs=iter(runs),
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


def test_a_run_whose_host_is_lost_is_started_again_before_the_others(scheduling):
    lost = iter([LOST_HOST, 0, 0])
    states, shown = scheduling("12", codes=lost)
    assert states == ["finished", "finished"] and "1: its host is lost; it is started again, and resumes" in shown
    assert len(scheduling.started) == 3


def test_a_run_that_loses_every_host_is_given_up(scheduling):
    states, shown = scheduling("1", state="running", codes=itertools.repeat(LOST_HOST))
    assert states == ["interrupted"] and "killed by signal 9" in shown
    assert len(scheduling.started) == MAX_LOST + 1


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


CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
EIGHT = tuple("01234567")


@pytest.fixture
def without_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_each_slot_of_a_sweep_gets_its_own_devices(without_devices):
    plan = LaunchPlan(Path("job.yaml"), 2, None, at_once=4, devices=EIGHT, num_cores=32)
    assert [plan.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["0,1", "2,3", "4,5", "6,7"]
    assert plan.environment(0)["OMP_NUM_THREADS"] == "4"


def test_more_runs_than_devices_share_the_devices(without_devices):
    plan = LaunchPlan(Path("job.yaml"), 1, None, at_once=3, devices=("5", "7"), num_cores=2)
    assert [plan.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["5", "7", "5"]
    assert plan.environment(0)["OMP_NUM_THREADS"] == "1"


def test_runs_on_a_cluster_have_as_many_slots_as_its_hosts_have_gpus_for():
    hosts = [HostResources(96, 8), HostResources(96, 8), HostResources(4, 0)]
    arguments = {"num_processes": 3, "accelerate_config": None, "at_once": None}
    plan = plan_launch(Path("job.yaml"), **arguments, hosts=hosts)
    assert (plan.at_once, plan.devices, plan.num_cores) == (4, (), 196)
    with pytest.raises(UserError, match="the largest host of the Ray cluster has 8 GPUs"):
        plan_launch(Path("job.yaml"), **{**arguments, "num_processes": 9}, hosts=hosts)
    without_gpus = [HostResources(4, 0), HostResources(2, 0)]
    assert plan_launch(Path("job.yaml"), **{**arguments, "num_processes": 2}, hosts=without_gpus).at_once == 3


def test_visible_devices_are_read_from_the_environment():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-1a2b"}) == ("3", "GPU-1a2b")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def test_without_devices_one_run_is_active_at_once_by_default(without_devices):
    assert plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=None, at_once=None).at_once == 1
    assert plan_launch(Path("job.yaml"), num_processes=2, accelerate_config=None, at_once=3).at_once == 3


def test_the_number_of_processes_is_read_from_the_accelerate_config(without_devices, tmp_path):
    plan = plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=CONFIGS / "ddp.yaml", at_once=None)
    assert plan.num_processes == 2
    with pytest.raises(UserError, match="starts each run on one machine"):
        plan_launch(
            Path("job.yaml"), num_processes=None, accelerate_config=CONFIGS / "multi_node_ddp.yaml", at_once=None
        )
    (tmp_path / "job.yaml").write_text("train: {steps: 4}")
    with pytest.raises(UserError, match="distributed_type: `None` is not supported"):
        plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=tmp_path / "job.yaml", at_once=None)
    with pytest.raises(UserError, match="it cannot be read"):
        plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=tmp_path / "none.yaml", at_once=None)


def test_processes_that_share_rows_compute_one_microbatch(without_devices, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 4}\nnum_processes: 8\n")
    plan = plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=path, at_once=None)
    assert (plan.num_processes, plan.data_parallel_size) == (8, 2)


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="has 2 devices"):
        plan_launch(Path("job.yaml"), num_processes=4, accelerate_config=None, at_once=None)
