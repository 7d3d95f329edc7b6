"""Whether two loss curves are the same: bitwise, within rounding, within noise, or different from a step on.

Losses are paired by step, which takes the common trend out; where the samples of each step are the same, the noise of
the data cancels as well. What is left, the differences d, is cut into windows. The runs are the same within noise
unless the mean of some window is further from 0 than noise makes it: further, in deviations of its window, than the
furthest of all windows is in 95% of simulated series, so that many windows raise no false alarm (max-T: Westfall and
Young 1993, Resampling-Based Multiple Testing, ch. 2). A series is simulated by the sieve bootstrap of order 1, which
keeps the correlation of neighboring steps (Bühlmann 1997, Bernoulli 3(2), 123-148): an autoregression is fitted to the
differences less their window's mean, its coefficient corrected for that (Marriott and Pope 1954, Biometrika 41,
390-402), and driven by its own residuals, drawn at random. So noise means what goes up and down within a window of
steps; a difference that lasts for a window counts as one, be it a better learning rate or another seed's luck.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from finetune.report.history import Steps

ROUNDING = 1e-4
"""The largest relative difference that counts as rounding: what strategies may differ by (`finetune verify parity`)."""

LEVEL = 0.05
MIN_STEPS, MIN_WINDOW, MAX_WINDOWS, MAX_GROUPS = 40, 20, 20, 4000
_NUM_SERIES, _SEED = 1000, 0
_LARGEST_COEFFICIENT = 0.99

Verdict = Literal["bitwise equal", "equal within rounding", "same within noise", "different", "unknown"]


@dataclass(frozen=True)
class Agreement:
    """How a run's losses compare with those of the first."""

    verdict: Verdict
    sentence: str
    num_common: int
    max_relative: float | None  # the largest difference of two losses at a step
    different_from: int | None  # the step
    order_differs_at: int | None  # the first step of which the samples differ; None: never, or not known
    has_same_samples: bool


def compare_losses(reference: Steps, other: Steps) -> Agreement:
    """Return how the losses at common steps agree, and from which step on the samples differ."""
    steps, ours, theirs = np.intersect1d(reference.numbers, other.numbers, assume_unique=True, return_indices=True)
    if not len(steps):
        return Agreement("unknown", "the runs have no step in common", 0, None, None, None, False)
    first, second = reference.losses[ours], other.losses[theirs]
    samples, other_samples = reference.samples[ours], other.samples[theirs]
    is_other = (samples != other_samples) & (samples != 0) & (other_samples != 0)
    order = int(steps[is_other.argmax()]) if is_other.any() else None
    is_known = bool(np.all(samples) and np.all(other_samples))
    verdict, sentence, largest, start = _judge(steps, first, second)
    return Agreement(verdict, sentence, len(steps), largest, start, order, is_known and order is None)


def _judge(steps: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[Verdict, str, float | None, int | None]:
    where = f"at all {len(steps):,} common steps"
    if np.array_equal(first, second, equal_nan=True):
        return "bitwise equal", f"every loss is bitwise equal {where}", 0.0, None
    is_finite = np.isfinite(first) & np.isfinite(second)
    if (np.isfinite(first) != np.isfinite(second)).any():
        start = int(steps[(np.isfinite(first) != np.isfinite(second)).argmax()])
        return "different", f"at step {start:,} one loss is finite and the other is not", None, start
    steps, first, second = steps[is_finite], first[is_finite], second[is_finite]
    largest = float(np.max(np.abs(first - second) / np.maximum(np.abs(first), 1e-12), initial=0.0))
    if largest <= ROUNDING:
        return "equal within rounding", f"losses are equal within {largest:.1e} (relative) {where}", largest, None
    if len(steps) < MIN_STEPS:
        text = f"losses differ by up to {largest:.1e} (relative), and {len(steps)} steps are too few to know the noise"
        return "unknown", text, largest, None
    index, window, deviation = first_different_window(second - first)
    if index is None:
        text = f"no mean of {window} steps differs by more than noise explains (95%, bootstrap); "
        return "same within noise", text + f"the largest single difference is {largest:.1e} (relative)", largest, None
    start = int(steps[index])
    text = f"from step {start:,} on: over {window} steps the loss is {abs(deviation):.4f} "
    return "different", text + ("higher" if deviation > 0 else "lower") + ", more than noise explains", largest, start


def first_different_window(differences: np.ndarray) -> tuple[int | None, int, float]:
    """Return where the first window begins whose mean is not noise (None: nowhere), its width, and that mean."""
    width = -(-len(differences) // MAX_GROUPS)  # steps in a group: of long runs, means of neighbors are looked at
    groups = differences[: len(differences) // width * width].reshape(-1, width).mean(axis=1)
    num_windows = min(MAX_WINDOWS, len(groups) // MIN_WINDOW)
    window, left_over = divmod(len(groups), num_windows)
    windows = groups[left_over:].reshape(num_windows, window)  # at most 19 groups, at the start, are in no window
    means = windows.mean(axis=1)
    deviations = np.maximum(windows.std(axis=1, ddof=1), 1e-300)
    is_outside = np.abs(means) / deviations > _critical_value((windows - means[:, None]) / deviations[:, None])
    if not is_outside.any():
        return None, window * width, 0.0
    index = int(is_outside.argmax())
    return (left_over + index * window) * width, window * width, float(means[index])


def _critical_value(noise: np.ndarray) -> float:
    """Return what the furthest window exceeds in 5% of simulated series; `noise` is [windows, steps]."""
    num_windows, window = noise.shape
    before, after = noise[:, :-1], noise[:, 1:]
    fitted = float((before * after).sum() / max((before * before).sum(), 1e-300))
    coefficient = min((fitted * window + 1) / (window - 3), _LARGEST_COEFFICIENT)
    generator = np.random.default_rng(_SEED)
    drawn = generator.choice((after - coefficient * before).ravel(), size=(num_windows * window + window, _NUM_SERIES))
    for step in range(1, len(drawn)):
        drawn[step] += coefficient * drawn[step - 1]
    series = drawn[window:].reshape(num_windows, window, _NUM_SERIES)  # the first window starts it
    distances = np.abs(series.mean(axis=1)) / np.maximum(series.std(axis=1, ddof=1), 1e-300)
    return float(np.quantile(distances.max(axis=0), 1 - LEVEL))
