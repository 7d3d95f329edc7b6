import os
import sys
from pathlib import Path

import pytest

from comparison import controller
from comparison.competitors.launch import ROOT, launch_variables
from comparison.controller import Controller, StepCosts
from comparison.strategies import Measured, competitors, result, write_job_of_two
from comparison.workloads import Form, Workload

FAKE = Path(__file__).with_name("fake_competitor.py")


def measured(strategy: str, **seconds: list[float]) -> Measured:
    return Measured(strategy, {name: StepCosts(each, losses=[1.0]) for name, each in seconds.items()})


def test_the_cost_of_a_step_is_the_sum_over_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(controller, "environment", lambda: {**os.environ, "PYTHONPATH": benchmarks})
    monkeypatch.setattr(controller, "command", lambda name: [sys.executable, str(FAKE), "1", name])
    with Controller(tmp_path, num_processes=2) as table:
        table.start(["quick"])
        costs = table.measure(Path("5"), ["quick"], rounds=2, warm_up=2, strategy="ddp")
    assert costs["quick"].seconds == [2 * 3, 2 * 4]  # the third and the fourth step
    assert costs["quick"].losses == [2.0, 1.0, 2 / 3, 0.5, 0.4]  # shares of a mean, added up


def test_ddp_is_held_against_the_loop_by_hand_and_the_others_against_trainer() -> None:
    ddp = result(measured("ddp", bare=[1.0, 1.0], ours=[1.25, 1.0]), "")
    assert (ddp.topic, ddp.threshold, ddp.spread.median) == (5, 0.98, 0.9)
    zero = result(measured("zero3", trainer=[2.0, 2.0], ours=[1.0, 1.0]), "")
    assert (zero.threshold, zero.spread.median, zero.is_met) == (1.0, 2.0, True)


def test_only_the_full_run_has_trainers_ddp() -> None:
    assert "trainer" not in competitors("ddp", Form.QUICK)
    assert "trainer" in competitors("ddp", Form.FULL)


def test_losses_that_differ_are_seen() -> None:
    costs = {"bare": StepCosts(losses=[2.0, 1.0]), "ours": StepCosts(losses=[2.0, 1.1])}
    assert Measured("ddp", costs).loss_difference == pytest.approx(0.1)


def test_every_rank_takes_half_of_the_batch(tmp_path: Path) -> None:
    job = write_job_of_two(tmp_path, Workload("pairs", "", (), 3, "fixed", batch=8)).read_text()
    assert "global_batch_size: 8\n  microbatch_size: 4\n" in job


@pytest.mark.parametrize(
    ("strategy", "name"), [("fsdp2", "ACCELERATE_USE_FSDP"), ("zero3", "ACCELERATE_USE_DEEPSPEED"), ("ddp", None)]
)
def test_a_rank_gets_the_environment_variables_of_the_launcher(strategy: str, name: str | None) -> None:
    told = launch_variables(ROOT / "accelerate_configs" / f"{strategy}.yaml", world="2")
    assert {each for each in told if each.startswith("ACCELERATE_USE_")} == ({name} if name else set())
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & told.keys()
