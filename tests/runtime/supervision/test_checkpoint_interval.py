"""Daly's interval equals a hand calculation and loses the least time."""

import math

import pytest

from finetune.runtime.supervision.checkpoint_interval import (
    advise_interval,
    best_interval,
    daly_interval,
    expected_time,
)


def test_dalys_interval_by_hand():
    """Daly, 2006, equation 37: 120 (1 + 1/3 sqrt(5/2880) + 1/9 5/2880) - 5 = 116.69."""
    by_hand = 120 * (1 + math.sqrt(5 / 2880) / 3 + 5 / 2880 / 9) - 5
    assert by_hand == pytest.approx(116.69, abs=0.005)
    assert daly_interval(save=5.0, between_failures=1440.0) == pytest.approx(by_hand)


def test_the_checkpoint_interval_is_the_time_between_failures_if_saving_takes_over_half_of_it():
    assert daly_interval(save=10.0, between_failures=5.0) == 5.0


@pytest.mark.parametrize(("save", "between"), [(5.0, 1440.0), (1.0, 60.0), (10.0, 60.0), (0.01, 24.0)])
def test_daly_s_interval_loses_the_least_time(save: float, between: float):
    """Daly's estimate is within 1% of the least expected time over a fine grid (Daly, 2006, figure 5)."""

    def total(interval: float) -> float:
        return expected_time(1000.0, interval=interval, save=save, restart=2.0, between_failures=between)

    grid = [save * 0.05 * 1.02**power for power in range(800)]
    least = min(total(interval) for interval in grid)
    assert total(daly_interval(save=save, between_failures=between)) < 1.01 * least


def test_expected_time_by_hand():
    """Daly (2006), equation 20: work 100, interval 10, saving 1, restart 2, a failure in 50."""
    assert expected_time(100.0, interval=10.0, save=1.0, restart=2.0, between_failures=50.0) == pytest.approx(
        50 * math.exp(0.04) * (math.exp(0.22) - 1) * 10
    )


def test_the_expected_time_is_infinite_if_failures_outpace_checkpoints():
    assert expected_time(1.0, interval=1e6, save=1.0, restart=0.0, between_failures=1.0) == math.inf


def test_writing_bounds_the_interval_from_below():
    """Daly's would be sqrt(2 x 0.01 x 3600) = 8.5 s; a twentieth of the hour between failures is 180 s."""
    assert best_interval(save=0.01, write=10.0, between_failures=3600.0) == 180.0
    assert best_interval(save=0.01, write=200.0, between_failures=3600.0) == 200.0
    assert best_interval(save=60.0, write=10.0, between_failures=86_400.0) == daly_interval(
        save=60.0, between_failures=86_400.0
    )


def advised(**changed):
    given = {"save_seconds": 0.4, "write_seconds": 1.0, "step_seconds": 2.0, "every_steps": 1000}
    return advise_interval(**{**given, "hours_between_interruptions": 6.0, "is_stated": True, **changed})


def test_the_checkpoint_interval_advice_equals_a_hand_calculation():
    """An interruption loses half of an interval: 1,000 steps of 2 s are 1,000 s, the best 300 s are 150 s."""
    advice = advised()
    assert (advice.best_steps, advice.lost_seconds(1000), advice.lost_seconds(150)) == (150, 1000.0, 150.0)
    assert not advice.is_right
    assert advised(every_steps=300).is_right and advised(every_steps=75).is_right
    assert not advised(every_steps=None).is_right


def test_frequent_saves_are_not_advised_against_if_they_cost_little():
    """0.4 s every 50 steps of 2 s are 0.4%; every 5 steps they are 4%."""
    assert (advised().save_share(50), advised().save_share(5)) == (0.004, 0.04)
    assert advised(every_steps=50).is_right and not advised(every_steps=5).is_right


@pytest.mark.parametrize("changed", [{"step_seconds": 0.0}, {"step_seconds": math.nan}, {"save_seconds": math.nan}])
def test_unmeasured_values_give_no_checkpoint_interval_advice(changed: dict):
    assert advised(**changed) is None


def test_a_step_longer_than_the_interval_is_saved_each_time():
    assert advised(step_seconds=10_000.0).best_steps == 1
