import os
import sys
from pathlib import Path

import pytest

from comparison import controller
from comparison.controller import CompetitorFailed, Controller

FAKE = Path(__file__).with_name("fake_competitor.py")
COSTS = {"quick": "1", "slow": "3", "dies": "1"}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(controller, "environment", lambda: {**os.environ, "PYTHONPATH": benchmarks})
    monkeypatch.setattr(controller, "command", lambda name: [sys.executable, str(FAKE), COSTS[name], name])


def test_each_round_records_the_step_cost_of_every_competitor(tmp_path: Path) -> None:
    with Controller(tmp_path, seed=0) as table:
        table.start(["quick", "slow"])
        costs = table.measure(Path("6"), ["quick", "slow"], rounds=3, warm_up=2)
    assert costs["quick"].seconds == [3, 4, 5]  # the third to the fifth of six steps: the last has no end to be seen
    assert costs["slow"].seconds == [9, 12, 15]
    assert costs["slow"].seconds_per_token == [0.9, 1.2, 1.5]
    assert costs["quick"].targets == [4, 4, 4]
    assert costs["quick"].losses == [1 / step for step in range(1, 7)]
    assert costs["quick"].peak_bytes > 1e6
    assert "goes to the log" in (tmp_path / "quick.log").read_text()


def test_competitors_that_are_still_alive_run_the_next_workload(tmp_path: Path) -> None:
    with Controller(tmp_path, seed=0) as table:
        table.start(["quick"])
        process = table._alive["quick"][0]._process.pid
        table.measure(Path("2"), ["quick"], rounds=1, warm_up=0)
        table.start(["quick"])
        again = table.measure(Path("3"), ["quick"], rounds=2, warm_up=0)
        assert table._alive["quick"][0]._process.pid == process
    assert again["quick"].seconds == [1, 2]
    assert again["quick"].losses == [1, 1 / 2, 1 / 3]


def test_the_order_of_competitors_is_shuffled_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    take = Controller._take

    def noting(self, names, message, expected):  # type: ignore[no-untyped-def]
        orders.append(list(names))
        return take(self, names, message, expected)

    monkeypatch.setattr(Controller, "_take", noting)
    with Controller(tmp_path, seed=1) as table:
        table.start(["quick", "slow"])
        table.measure(Path("21"), ["quick", "slow"], rounds=20, warm_up=0)
    turns = [name for order in orders for name in order if len(order) == 1]
    firsts = turns[::2]
    assert len(firsts) == 20
    assert {"quick", "slow"} == set(firsts)
    assert all(set(turns[i : i + 2]) == {"quick", "slow"} for i in range(0, 40, 2))  # one step each, every round


def test_a_worker_that_dies_is_reported_with_its_last_log_lines_and_all_workers_end(tmp_path: Path) -> None:
    with Controller(tmp_path, seed=0) as table:
        table.start(["quick", "dies"])
        processes = [process._process for (process,) in table._alive.values()]
        with pytest.raises(CompetitorFailed, match=r"(?s)dies ended with exit code 1.*no more of this"):
            table.measure(Path("6"), ["quick", "dies"], rounds=5, warm_up=0)
    assert all(process.poll() is not None for process in processes)
