"""Devices and threads of each run of a sweep, and the signals that stop it."""

import signal
from pathlib import Path

import pytest

from finetune.commands.sweep.launching import (
    HostResources,
    LaunchPlan,
    StopSignals,
    plan_launch,
    visible_devices,
)
from finetune.errors import UserError

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


def test_a_second_sigint_kills_and_a_second_sigterm_does_not():
    stop = StopSignals()
    stop.record(signal.SIGTERM)
    stop.record(signal.SIGTERM)
    assert not stop.is_urgent
    stop.record(signal.SIGINT)
    assert stop.is_urgent and stop.first is signal.SIGTERM
