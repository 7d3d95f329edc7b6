from pathlib import Path

import pytest

from contest import steps
from contest.controller import Controller
from contest.ratios import Played
from contest.steps import LossesDiffer, make, play, present, refuse_different
from contest.workloads import Sizes, Workload

TINY = Sizes(vocabulary=2048, width=64, inner=172, layers=2)


def test_whoever_learns_something_else_stops_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(Workload("equivalence", "", ("bare", "ours"), 2), "", {})
    monkeypatch.setattr(steps, "differing", lambda played, among: {"ours": 0.25})
    with pytest.raises(LossesDiffer, match=r"ours by 2.5e-01.*nothing was timed"):
        refuse_different(played)


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[benchmark]'" in steps.absent()[0]
    assert present(Workload("tiny", "", ("bare", "trl equal", "ours"), 2)).contestants == ("bare", "ours")


@pytest.mark.slow
def test_the_product_takes_the_bare_loops_steps(tmp_path: Path) -> None:
    """Two real contestants, on rows that are made up: the same losses, the same tokens."""
    workload = Workload("equivalence", "short", ("bare", "ours"), 4, "gsm8k", TINY, batch=2, warm_up=1)
    make(tmp_path, [workload], data=tmp_path, seed=3)
    said: list[str] = []
    with Controller(tmp_path, seed=3) as controller:
        played = play(controller, tmp_path, workload, log=said.append)
    refuse_different(played)
    bare, ours = (played.sheets[name] for name in workload.contestants)
    assert len(bare.losses) == len(ours.losses) == 6
    assert bare.tokens == ours.tokens
    assert bare.targets == ours.targets
    assert len(bare.seconds) == 4
    assert "targets" in said[0]
