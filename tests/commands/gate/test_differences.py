"""The interval of a paired difference: what it contains, and how often it raises a false alarm."""

from collections.abc import Callable

import numpy as np
import pytest

from finetune.commands.gate.differences import MIN_ROWS, PairedDifference, loss_difference, share_difference

ONES = np.ones(30)


def test_the_means_are_those_of_an_evaluation_over_all_targets():
    num_targets = np.tile([1.0, 3.0], 15)
    found = loss_difference(num_targets * 2.0, num_targets * 2.0 - np.tile([0.0, 1.0], 15), num_targets)
    assert (found.baseline, found.tuned, found.gain) == (2.0, pytest.approx(1.75), pytest.approx(0.25))
    assert found.low is not None and found.high is not None
    assert found.low < 0.25 < found.high


def test_equal_losses_have_an_interval_of_no_width():
    losses = np.random.default_rng(1).lognormal(size=30)
    found = loss_difference(losses, losses, ONES)
    assert (found.gain, found.low, found.high) == (0.0, 0.0, 0.0)
    assert found.verdict(0.0) == found.verdict(0.01) == "no difference"
    assert loss_difference(losses + 0.5, losses, ONES).verdict(0.01) == "better"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.02, 0.05, "better"),
        (0.005, 0.05, "undecided"),
        (-0.005, 0.005, "no difference"),
        (-0.05, 0.05, "undecided"),
        (-0.05, -0.005, "undecided"),
        (-0.05, -0.02, "worse"),
        (None, None, "undecided"),
    ],
)
def test_the_whole_interval_decides(low: float | None, high: float | None, verdict: str):
    assert PairedDifference(1.0, 1.0, 0.0, low, high).verdict(0.01) == verdict


@pytest.mark.parametrize(("count", "verdict"), [(5, "undecided"), (6, "better")])
def test_five_rows_that_differ_decide_nothing(count, verdict):
    gains = (np.arange(100) < count) * np.linspace(4.0, 5.0, 100)
    assert loss_difference(gains, np.zeros(100), np.ones(100)).verdict(0.0) == verdict


def test_few_rows_decide_nothing_and_a_loss_that_is_not_a_number_is_worse():
    few = np.arange(MIN_ROWS - 1.0)
    assert loss_difference(few + 5.0, few, np.ones(len(few))).low is None
    diverged = loss_difference(ONES, np.where(np.arange(30) == 3, np.nan, 1.0), ONES)
    assert (diverged.low, diverged.verdict(0.01)) == (None, "worse")


def test_the_interval_of_a_share_contains_it_and_is_the_same_each_time():
    was_right, is_right = np.arange(100) < 30, np.arange(100) < 50
    found = share_difference(was_right, is_right)
    assert (found.baseline, found.tuned, found.gain) == (0.3, 0.5, pytest.approx(0.2))
    assert found == share_difference(was_right, is_right)
    assert found.low is not None and found.high is not None
    assert 0.1 < found.low < 0.2 < found.high < 0.3


NO_DIFFERENCE: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, count: random.normal(size=count),
    "skewed": lambda random, count: random.exponential(size=count) - 1.0,
    "heavy tails": lambda random, count: random.standard_t(4, size=count),
    "few rows differ": lambda random, count: random.normal(size=count) * (random.random(count) < 0.2),
    "tiny": lambda random, count: 1e-6 * random.normal(size=count),
}
"""Differences per target whose mean is 0."""


def alarms(count: int, seeds: range) -> list[str]:
    """Return the cases, each of a kind and a seed, in which models without a difference are called better or worse."""
    found = []
    for name, draw in NO_DIFFERENCE.items():
        for seed in seeds:
            random = np.random.default_rng([seed, count])
            num_targets = random.integers(2, 30, count).astype(np.float64)
            losses = num_targets * random.lognormal(size=count)
            verdict = loss_difference(losses, losses - num_targets * draw(random, count), num_targets).verdict(0.0)
            found += [f"{name}, seed {seed}: {verdict}"] if verdict in ("better", "worse") else []
    return found


def test_at_most_5_percent_of_false_alarms_with_20_seeds_and_no_margin():
    assert len(alarms(100, range(20))) <= 0.05 * 20 * len(NO_DIFFERENCE)
