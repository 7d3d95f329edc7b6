"""The verdicts on pairs of loss curves that are known to be the same, or not."""

import numpy as np
import pytest

from finetune.commands.compare.comparison import compare_losses, first_different_window
from finetune.report.history import Steps

COUNT = 600


def steps_of(losses: np.ndarray, *, first: int = 1, order: int = 1, reordered_from: int | None = None) -> Steps:
    steps = Steps()
    for number, loss in enumerate(losses.tolist(), start=first):
        is_reordered = reordered_from is not None and number >= reordered_from
        steps.add({"step": number, "loss": loss, "samples_sha256": f"{number * 10 + order + is_reordered:016x}"})
    return steps


def curve(count: int = COUNT) -> np.ndarray:
    return 1 + 4 * np.exp(-np.arange(count) / 150)


def noise(seed: int, *, count: int = COUNT, correlation: float = 0.5) -> np.ndarray:
    """Return noise of deviation 0.1 that neighboring steps share in part."""
    fresh = np.random.default_rng(seed).normal(0, 0.1 * np.sqrt(1 - correlation**2), count)
    correlated = np.empty(count)
    correlated[0] = fresh[0]
    for index in range(1, count):
        correlated[index] = correlation * correlated[index - 1] + fresh[index]
    return correlated


def test_equal_losses_are_bitwise_equal():
    losses = curve() + noise(0)
    agreement = compare_losses(steps_of(losses), steps_of(losses.copy()))
    assert (agreement.verdict, agreement.max_relative, agreement.has_same_samples) == ("bitwise equal", 0.0, True)


def test_losses_that_differ_by_rounding_are_equal_within_rounding():
    losses = curve() + noise(0)
    agreement = compare_losses(steps_of(losses), steps_of(losses * (1 + 3e-7)))
    assert agreement.verdict == "equal within rounding"
    assert agreement.max_relative == pytest.approx(3e-7, rel=1e-3)


def test_only_common_steps_are_compared():
    losses = curve()
    agreement = compare_losses(steps_of(losses), steps_of(losses[100:], first=101))
    assert (agreement.verdict, agreement.num_common) == ("bitwise equal", COUNT - 100)
    assert compare_losses(steps_of(losses), steps_of(losses, first=5000)).verdict == "unknown"


def test_noise_is_recognized_in_nineteen_of_twenty_cases():
    pairs = [(noise(2 * seed), noise(2 * seed + 1)) for seed in range(100)]
    is_different = [first_different_window(first - second)[0] is not None for first, second in pairs]
    assert sum(is_different) <= 12  # 5 are expected


def test_a_lasting_difference_is_located_where_it_starts():
    starts = []
    for seed in range(20):
        losses = curve() + noise(2 * seed)
        worse = curve() + noise(2 * seed + 1) + np.where(np.arange(COUNT) >= 300, 0.3, 0.0)
        agreement = compare_losses(steps_of(losses), steps_of(worse, order=2))
        assert agreement.verdict == "different"
        assert agreement.order_differs_at == 1
        starts.append(agreement.different_from)
    assert sum(270 <= start <= 345 for start in starts) >= 17  # a false alarm before it comes once in 20 cases


def test_losses_that_are_the_same_within_noise():
    agreement = compare_losses(steps_of(curve() + noise(4)), steps_of(curve() + noise(5)))
    assert agreement.verdict == "same within noise"
    assert "95%, bootstrap" in agreement.sentence


def test_a_diverged_run_is_different_from_its_first_nan_loss_on():
    losses = curve()
    broken = losses.copy()
    broken[250:] = np.nan
    agreement = compare_losses(steps_of(losses), steps_of(broken))
    assert (agreement.verdict, agreement.different_from) == ("different", 251)


def test_a_comparison_of_few_steps_has_no_verdict():
    agreement = compare_losses(steps_of(curve(10)), steps_of(curve(10) + 0.1))
    assert agreement.verdict == "unknown"
    assert "too few" in agreement.sentence


def test_the_first_step_with_other_samples_is_named():
    agreement = compare_losses(steps_of(curve()), steps_of(curve(), reordered_from=42))
    assert (agreement.order_differs_at, agreement.has_same_samples) == (42, False)


def test_very_long_runs_are_compared():
    losses = np.random.default_rng(0).normal(2, 0.1, (2, 500_000))
    assert first_different_window(losses[0] - losses[1])[0] is None
    losses[1, 400_000:] += 0.02
    start, _, deviation = first_different_window(losses[1] - losses[0])
    assert 375_000 <= start <= 425_000
    assert deviation > 0
