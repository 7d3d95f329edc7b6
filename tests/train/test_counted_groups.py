"""The next step is counted while a step ends, where that is sure to be used and steps are short."""

from types import SimpleNamespace

import pytest

from finetune.runtime.progress import Cadence, NeverDue
from finetune.train import counted_groups
from finetune.train.counted_groups import CountedGroups
from finetune.train.step import StepCounts
from finetune.train.stopping import StopRequest

COUNTS = StepCounts(1, 1, 0, StopRequest(None, saves=False), has_news=False)
SLOW = StepCounts(1, 1, 0, StopRequest(None, saves=False), has_news=False, is_slow=True)


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What was fetched, counted and waited for, in order."""
    found: list[str] = []

    def start(parts, batches, *, step, is_slow):
        found.append(f"count {step}{' slow' if is_slow else ''}")
        return lambda: found.append(f"wait {step}") or COUNTS

    monkeypatch.setattr(counted_groups, "start_step_counts", start)
    return found


def parts(log, *, num_steps=8, evaluate_due=None, stop_after_steps=None, counts_ahead=True) -> SimpleNamespace:
    def groups(first_step):
        for step in range(first_step, num_steps):
            log.append(f"fetch {step}")
            yield (f"batch of {step}",)

    return SimpleNamespace(
        groups=groups,
        plan=SimpleNamespace(num_steps=num_steps),
        evaluate_due=evaluate_due or NeverDue(),
        stop_after_steps=stop_after_steps,
        counts_ahead=counts_ahead,
    )


def run(log, *, first_step=0, last=4, counts=COUNTS, **settings) -> list[str]:
    groups = CountedGroups(parts(log, **settings), first_step=first_step)
    for step in range(first_step, last):
        taken = groups.take(step)
        assert taken.batches == (f"batch of {step}",)
        log.append(f"forward {step}")
        groups.start_next_count(step + 1, counts=counts)
        log.append(f"backward {step}")
    return log


def test_the_next_step_is_counted_before_the_backward_pass_and_awaited_after_it(log):
    run(log)
    assert log[:7] == ["fetch 0", "count 0", "wait 0", "forward 0", "backward 0", "fetch 1", "count 1"]
    assert log[8:15] == ["forward 1", "fetch 2", "count 2", "backward 1", "wait 2", "forward 2", "fetch 3"]


def test_no_count_is_started_that_may_never_be_awaited(log):
    run(log, last=8)
    assert log[-2:] == ["forward 7", "backward 7"]
    assert log.count("wait 7") == 1
    assert "count 8" not in log


@pytest.mark.parametrize("settings", [{"stop_after_steps": 3}, {"evaluate_due": Cadence(3, 8)}, {"num_steps": 4}])
def test_saves_and_evaluations_come_before_the_count_of_the_next_step(log, settings):
    run(log, **settings)
    assert log.index("count 2") < log.index("backward 1")
    assert log.index("backward 3") == len(log) - 1
    if "num_steps" not in settings:
        assert log.index("backward 2") < log.index("count 3")


def test_the_next_step_is_not_counted_early_after_a_request_that_ends_the_step(log):
    run(log, counts_ahead=False)
    assert log[5:10] == ["fetch 1", "count 1", "wait 1", "forward 1", "backward 1"]


def test_slow_steps_are_counted_at_their_start_so_that_a_stop_takes_effect_immediately(log, monkeypatch):
    monkeypatch.setattr(counted_groups, "SLOW_SECONDS", -1.0)
    run(log, counts=SLOW)
    assert log[:10] == [
        *("fetch 0", "count 0 slow", "wait 0", "forward 0", "backward 0"),
        *("fetch 1", "count 1 slow", "wait 1", "forward 1", "backward 1"),
    ]
