from pathlib import Path

import pytest

from comparison import steps
from comparison.controller import Controller
from comparison.ratios import Measured
from comparison.steps import LossesDiffer, make, not_installed, require_equal_losses, run, with_installed
from comparison.workloads import Sizes, Workload

TINY = Sizes(vocabulary=2048, width=64, inner=172, layers=2)


def test_a_competitor_with_different_losses_stops_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(Workload("equivalence", "", ("bare", "ours"), 2), "", {})
    monkeypatch.setattr(Measured, "differing", lambda self: {"ours": 0.25})
    with pytest.raises(LossesDiffer, match=r"ours by 2.5e-01.*nothing was timed"):
        require_equal_losses(measured)


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[benchmark]'" in not_installed()[0]
    assert with_installed(Workload("tiny", "", ("bare", "trl equal", "ours"), 2)).competitors == ("bare", "ours")


@pytest.mark.slow
def test_the_product_takes_the_bare_loops_steps(tmp_path: Path) -> None:
    """Two real competitors, on rows that are made up: the same losses, the same tokens."""
    workload = Workload("equivalence", "short", ("bare", "ours"), 4, "gsm8k", TINY, batch=2, warm_up=1)
    make(tmp_path, [workload], data=tmp_path)
    lines: list[str] = []
    with Controller(tmp_path) as controller:
        measured = run(controller, tmp_path, workload, log=lines.append)
    require_equal_losses(measured)
    bare, ours = (measured.costs[name] for name in workload.competitors)
    assert len(bare.losses) == len(ours.losses) == 6
    assert bare.tokens == ours.tokens
    assert bare.targets == ours.targets
    assert len(bare.seconds) == 4
    assert "targets" in lines[0]
