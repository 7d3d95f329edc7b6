"""However long a curve is, its spikes are where they were, and its means are those of all its points."""

import random

import numpy as np
import pytest

from finetune.report.curves import MAX_BUCKETS, Curve


def test_a_short_curve_is_drawn_point_by_point():
    curve = Curve()
    curve.extend([1, 2, 3], [5.0, 4.0, 6.0])
    points = curve.points()
    assert points.steps.tolist() == [1, 2, 3]
    assert points.values.tolist() == points.means.tolist() == [5.0, 4.0, 6.0]
    assert points.width == 1


@pytest.fixture(scope="module")
def long_values() -> np.ndarray:
    values = np.random.default_rng(0).normal(2.0, 0.1, 300_001)
    values[[12_345, 299_999]] = 50.0, -50.0
    return values


def filled(values: np.ndarray, *, seed: int) -> Curve:
    """Return a curve that got its points in portions of random sizes."""
    curve, generator, start = Curve(), random.Random(seed), 0
    while start < len(values):
        end = start + generator.choice((1, 7, 300, 5000, 40_000))
        curve.extend(range(start, min(end, len(values))), values[start:end].tolist())
        start = end
    return curve


@pytest.mark.parametrize("seed", range(4))
def test_a_long_curve_keeps_its_spikes_and_its_mean(long_values: np.ndarray, seed: int):
    points = filled(long_values, seed=seed).points()
    assert len(points.means) <= MAX_BUCKETS + 1
    assert points.steps[points.values.argmax()] == 12_345
    assert points.steps[points.values.argmin()] == 299_999
    assert (np.diff(points.steps) > 0).all()
    assert points.counts.sum() == len(long_values)
    assert np.average(points.means, weights=points.counts) == pytest.approx(long_values.mean())


def test_every_drawn_point_was_measured(long_values: np.ndarray):
    points = filled(long_values, seed=1).points()
    assert (long_values[points.steps.astype(int)] == points.values).all()


def test_steps_that_are_taken_again_are_forgotten():
    curve = Curve()
    curve.extend(range(1, 11), [1.0] * 10)
    curve.cut_after(6)
    curve.extend(range(7, 9), [2.0] * 2)
    points = curve.points()
    assert points.steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert points.values.tolist() == [1.0] * 6 + [2.0] * 2


def test_a_cut_bucket_loses_less_than_a_thousandth_of_the_curve(long_values: np.ndarray):
    curve = filled(long_values, seed=2)
    curve.cut_after(200_000)
    steps = curve.points().steps
    assert 200_000 - 2 * len(long_values) / MAX_BUCKETS < steps[-1] <= 200_000


def test_values_that_are_not_finite_are_counted_and_not_drawn():
    curve = Curve()
    curve.extend([1, 2, 3, 4], [1.0, float("nan"), float("inf"), 2.0])
    assert curve.points().values.tolist() == [1.0, 2.0]
    assert curve.num_not_finite == 2
