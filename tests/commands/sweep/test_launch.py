"""Every run gets its share of devices and threads, its own folder and port, and resumes from its own checkpoints."""

from pathlib import Path

import pytest

from finetune.commands.sweep.launch import LaunchPlan, own_overrides, plan_launch, visible_devices
from finetune.commands.sweep.runs import SweepRun
from finetune.config.load import load_config
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


def test_visible_devices_are_read_from_the_environment():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-1a2b"}) == ("3", "GPU-1a2b")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def test_without_devices_one_run_is_active_at_once_by_default(without_devices):
    assert plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=None, at_once=None).at_once == 1
    assert plan_launch(Path("job.yaml"), num_processes=2, accelerate_config=None, at_once=3).at_once == 3


def test_the_number_of_processes_is_read_from_the_accelerate_config(without_devices, tmp_path):
    plan = plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=CONFIGS / "ddp.yaml", at_once=None)
    assert plan.num_processes == 2
    with pytest.raises(UserError, match="on this machine only"):
        plan_launch(
            Path("job.yaml"), num_processes=None, accelerate_config=CONFIGS / "multi_node_ddp.yaml", at_once=None
        )
    (tmp_path / "job.yaml").write_text("train: {steps: 4}")
    with pytest.raises(UserError, match="this is not an accelerate config"):
        plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=tmp_path / "job.yaml", at_once=None)
    with pytest.raises(UserError, match="cannot be read"):
        plan_launch(Path("job.yaml"), num_processes=None, accelerate_config=tmp_path / "none.yaml", at_once=None)


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="has 2 devices"):
        plan_launch(Path("job.yaml"), num_processes=4, accelerate_config=None, at_once=None)


def test_a_run_that_starts_from_a_checkpoint_resumes_from_its_own(job, tmp_path):
    run = SweepRun("a: b #c", {}, (), tmp_path)
    (job.parent / "other/checkpoints/step-000004").mkdir(parents=True)
    begins = load_config(job, ["checkpoint.resume=other/checkpoints/step-000004"])
    folder = f'run.folder="{tmp_path}/runs/a: b #c"'
    assert own_overrides(run, begins) == [folder]
    (run.folder / "checkpoints" / "step-000002").mkdir(parents=True)
    assert own_overrides(run, begins) == [folder, "checkpoint.resume=auto"]
    assert load_config(job, own_overrides(run, begins)).config.run.folder == str(run.folder)
