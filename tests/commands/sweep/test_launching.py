"""Devices and threads of each run of a sweep, and the signals that stop it."""

import signal
from pathlib import Path

import pytest

from finetune.commands.sweep.launching import LaunchPlan, StopSignals, plan_launch, visible_devices
from finetune.errors import UserError

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
EIGHT = tuple("01234567")


@pytest.fixture
def without_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("processes", "at_once", "devices", "cores", "expected", "threads"),
    [
        (2, 4, EIGHT, 32, ["0,1", "2,3", "4,5", "6,7"], "4"),
        (1, 3, ("5", "7"), 2, ["5", "7", "5"], "1"),  # more runs than devices share them
    ],
)
def test_each_slot_of_a_sweep_gets_its_own_devices(
    without_devices, processes, at_once, devices, cores, expected, threads
):
    plan = LaunchPlan(Path("job.yaml"), processes, None, at_once=at_once, devices=devices, num_cores=cores)
    assert [plan.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(at_once)] == expected
    assert plan.environment(0)["OMP_NUM_THREADS"] == threads


def test_visible_devices_are_read_from_the_environment():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-1a2b"}) == ("3", "GPU-1a2b")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def plan(accelerate: Path | None = None, processes: int | None = None, at_once: int | None = None) -> LaunchPlan:
    return plan_launch(Path("job.yaml"), num_processes=processes, accelerate_config=accelerate, at_once=at_once)


def test_without_devices_one_run_is_active_at_once_by_default(without_devices):
    assert plan().at_once == 1 and plan(processes=2, at_once=3).at_once == 3


def test_the_number_of_processes_is_read_from_the_accelerate_config(without_devices, tmp_path):
    assert plan(CONFIGS / "ddp.yaml").num_processes == 2
    with pytest.raises(UserError, match="starts each run on one machine"):
        plan(CONFIGS / "multi_node_ddp.yaml")
    with pytest.raises(UserError, match="it cannot be read"):
        plan(tmp_path / "none.yaml")
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 4}\nnum_processes: 8\n")
    assert (plan(path).num_processes, plan(path).data_parallel_size) == (8, 2)  # four share the rows


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="has 2 devices"):
        plan(processes=4)


def test_a_second_sigint_kills_and_a_second_sigterm_does_not():
    stop = StopSignals()
    stop.record(signal.SIGTERM)
    stop.record(signal.SIGTERM)
    assert not stop.is_urgent
    stop.record(signal.SIGINT)
    assert stop.is_urgent and stop.first is signal.SIGTERM
