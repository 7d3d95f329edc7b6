"""Whether two loss curves are the same: bitwise, within rounding, within noise, or different from a step on.

Losses are paired by step, which takes the common trend out; where the samples of each step are the same, the noise of
the data cancels as well. What is left, the differences d, is cut into windows. The runs are the same within noise
unless the mean of some window is further from 0 than noise makes it: further than in 95% of resampled series, where
the largest of all windows counts, so that many windows raise no false alarm (max-T: Westfall & Young 1993,
Resampling-Based Multiple Testing, ch. 2). A series is resampled by the moving block bootstrap, which keeps the
correlation of neighbouring steps (Künsch 1989, Annals of Statistics 17(3), 1217-1241), from the differences less their
window's mean, divided by their window's deviation. So noise means what goes up and down within a window of steps; a
difference that lasts for a window counts as one, be it a better learning rate or another seed's luck.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from finetune.commands.compare.runs import Steps

ROUNDING = 1e-4
"""The largest relative difference that counts as rounding: what strategies may differ by (`finetune verify parity`)."""

LEVEL = 0.05
MIN_STEPS, MIN_WINDOW, MOST_WINDOWS, MOST_GROUPS = 40, 20, 20, 4000
_NUM_SERIES, _SEED = 1000, 0

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
    order = _first_other_order(steps, reference.orders[ours], other.orders[theirs])
    is_known = bool(np.all(reference.orders[ours]) and np.all(other.orders[theirs]))
    verdict, sentence, largest, start = _judge(steps, first, second)
    return Agreement(verdict, sentence, len(steps), largest, start, order, is_known and order is None)


def _first_other_order(steps: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> int | None:
    is_other = (ours != theirs) & (ours != 0) & (theirs != 0)
    return int(steps[is_other.argmax()]) if is_other.any() else None


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
    place, window, deviation = first_different_window(second - first)
    if place is None:
        text = f"no mean of {window} steps differs by more than noise explains (95%, block bootstrap); "
        return "same within noise", text + f"the largest single difference is {largest:.1e} (relative)", largest, None
    start = int(steps[place])
    text = f"from step {start:,} on: over {window} steps the loss is {abs(deviation):.4f} "
    return "different", text + ("higher" if deviation > 0 else "lower") + ", more than noise explains", largest, start


def first_different_window(differences: np.ndarray) -> tuple[int | None, int, float]:
    """Return where the first window begins whose mean is not noise (None: nowhere), its width, and that mean."""
    width = -(-len(differences) // MOST_GROUPS)  # steps in a group: of long runs, means of neighbours are looked at
    groups = differences[: len(differences) // width * width].reshape(-1, width).mean(axis=1)
    window = max(MIN_WINDOW, len(groups) // MOST_WINDOWS)
    windows = groups[: len(groups) // window * window].reshape(-1, window)
    means = windows.mean(axis=1)
    deviations = np.maximum(windows.std(axis=1, ddof=1), 1e-300)
    noise = ((windows - means[:, None]) / deviations[:, None] * np.sqrt(window / (window - 1))).ravel()
    is_outside = np.abs(means) / deviations > _critical_value(noise, window=window)
    if not is_outside.any():
        return None, window * width, 0.0
    place = int(is_outside.argmax())
    return place * window * width, window * width, float(means[place])


def _critical_value(noise: np.ndarray, *, window: int) -> float:
    """Return what the largest studentized mean of all windows of a resampled series exceeds in 5% of the series."""
    generator = np.random.default_rng(_SEED)
    block = round(np.sqrt(window))
    num_blocks = -(-len(noise) // block)
    starts = generator.integers(0, len(noise) - block + 1, size=(_NUM_SERIES, num_blocks))
    largest = np.empty(_NUM_SERIES)
    for number, row in enumerate(starts):
        series = noise[(row[:, None] + np.arange(block)).ravel()[: len(noise)]].reshape(-1, window)
        spread = np.maximum(series.std(axis=1, ddof=1), 1e-300)
        largest[number] = np.max(np.abs(series.mean(axis=1)) / spread)
    return float(np.quantile(largest, 1 - LEVEL))
