import os
import sys
from pathlib import Path

import pytest

from contest import controller, pairs
from contest.launched import ROOT, launch_variables
from contest.pairs import Pairs, PairSheet
from contest.strategies import Played, contestants, findings, write_pair_job
from contest.workloads import Workload

FAKE = Path(__file__).with_name("fake_contestant.py")


def played(strategy: str, **seconds: list[float]) -> Played:
    return Played(strategy, {name: PairSheet(each, each, [1.0]) for name, each in seconds.items()})


def test_a_pairs_step_costs_what_both_ranks_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(controller, "environment", lambda: {**os.environ, "PYTHONPATH": benchmarks})
    monkeypatch.setattr(pairs, "rank_command", lambda name: [sys.executable, str(FAKE), "1", name])
    with Pairs(("quick", "trainer"), folder=tmp_path) as table:
        sheets = table.play(Path("5"), "ddp", ("quick", "trainer"), rounds=2, warm_up=2)
    assert sheets["quick"].seconds == [2 * 3, 2 * 4]  # the third and the fourth step
    assert sheets["quick"].losses == [2.0, 1.0, 2 / 3, 0.5, 0.4]  # shares of a mean, added up
    assert sheets["trainer"].losses[0] == 1.0  # whose ranks say it for all


def test_ddp_is_held_against_the_loop_by_hand_and_the_others_against_trainer() -> None:
    (ddp,) = findings(played("ddp", bare=[1.0, 1.0], ours=[1.25, 1.0]), "")
    assert (ddp.gate, ddp.limit, ddp.spread.median) == (5, 0.98, 0.9)
    (zero,) = findings(played("zero3", trainer=[2.0, 2.0], ours=[1.0, 1.0]), "")
    assert (zero.limit, zero.spread.median, zero.is_met) == (1.0, 2.0, True)


def test_only_the_full_run_has_trainers_ddp() -> None:
    assert "trainer" not in contestants("ddp", is_quick=True)
    assert "trainer" in contestants("ddp", is_quick=False)


def test_losses_that_differ_are_seen() -> None:
    sheets = {"bare": PairSheet(losses=[2.0, 1.0]), "ours": PairSheet(losses=[2.0, 1.1])}
    assert Played("ddp", sheets).apart == pytest.approx(0.1)


def test_every_rank_takes_half_of_the_batch(tmp_path: Path) -> None:
    job = write_pair_job(tmp_path, Workload("pairs", "", (), 3, "fixed", batch=8)).read_text()
    assert "global_batch_size: 8\n  microbatch_size: 4\n" in job


@pytest.mark.parametrize(
    ("strategy", "name"), [("fsdp2", "ACCELERATE_USE_FSDP"), ("zero3", "ACCELERATE_USE_DEEPSPEED"), ("ddp", None)]
)
def test_a_rank_is_told_what_the_launcher_would_tell_it(strategy: str, name: str | None) -> None:
    told = launch_variables(ROOT / "accelerate_configs" / f"{strategy}.yaml", world="2")
    assert {each for each in told if each.startswith("ACCELERATE_USE_")} == ({name} if name else set())
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & told.keys()
