"""The best interval between checkpoints under preemptions, and its cost.

Young (1974), "A first order approximation to the optimum checkpoint interval", and Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps". All times must have the same unit.
"""

import math
from dataclasses import dataclass

MIN_INTERVAL_SECONDS = 300.0
"""Lower limit of the interval, since more checkpoints gain little. It is lower if failures are frequent: a twentieth of
the time between them."""

_CLOSE = 2.0
"""Factor by which the interval may differ from the best one: the optimum is flat, and the loss grows by a quarter."""

_CHEAP = 0.005
"""Share of the steps' time below which the cost of frequent saves does not matter."""


def daly_interval(*, save: float, between_failures: float) -> float:
    """Return the interval by Daly's equation 37: Young's, for saves that may take long relative to the failures.

    >>> round(daly_interval(save=5, between_failures=1440), 1)  # minutes: a day between failures, 5 to save
    116.7
    """
    if save >= 2.0 * between_failures:
        return between_failures
    young = math.sqrt(2.0 * save * between_failures)
    ratio = save / (2.0 * between_failures)
    return young * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save


def expected_time(work: float, *, interval: float, save: float, restart: float, between_failures: float) -> float:
    """Return the duration of `work` with failures, by Daly's equation 20 (exponential times between them).

    `restart` passes after each failure before the work continues; `interval` is the computation between checkpoints.

    >>> expected_time(100.0, interval=10.0, save=0.0, restart=0.0, between_failures=1e9) < 100.001
    True
    """
    exponent = (interval + save) / between_failures
    if exponent > 700.0 or restart > 700.0 * between_failures:
        return math.inf
    return between_failures * math.exp(restart / between_failures) * math.expm1(exponent) * work / interval


def best_interval(*, save: float, write: float, between_failures: float) -> float:
    """Return Daly's interval in seconds, but at least the time of writing in the background and a lower limit."""
    lower_limit = min(MIN_INTERVAL_SECONDS, between_failures / 20)
    return max(daly_interval(save=save, between_failures=between_failures), write, lower_limit)


@dataclass(frozen=True)
class IntervalAdvice:
    """The best interval, by the measured times of a save and a step."""

    save_seconds: float
    hours_between_interruptions: float
    is_stated: bool  # by the user; otherwise observed
    every_steps: int | None
    best_steps: int
    step_seconds: float

    def lost_seconds(self, every_steps: int) -> float:
        """Return the loss of an interruption with this interval: half of it, on average."""
        return every_steps * self.step_seconds / 2

    def save_share(self, every_steps: int) -> float:
        """Return the time of saves with this interval, as a share of the steps' time."""
        return self.save_seconds / (every_steps * self.step_seconds)

    @property
    def is_right(self) -> bool:
        """Return whether another interval would gain little."""
        if self.every_steps is None:
            return False
        is_cheap = self.every_steps < self.best_steps and self.save_share(self.every_steps) < _CHEAP
        return is_cheap or 1 / _CLOSE <= self.every_steps / self.best_steps <= _CLOSE


def advise_interval(
    *,
    save_seconds: float,
    write_seconds: float,
    step_seconds: float,
    every_steps: int | None,
    hours_between_interruptions: float,
    is_stated: bool,
) -> IntervalAdvice | None:
    """Return the advice; None if a duration was not measured."""
    seconds = hours_between_interruptions * 3600
    if not (step_seconds > 0 and seconds > 0 and save_seconds >= 0 and math.isfinite(step_seconds + seconds)):
        return None
    interval = best_interval(save=save_seconds, write=write_seconds, between_failures=seconds)
    best = max(1, round(interval / step_seconds))
    return IntervalAdvice(
        save_seconds=save_seconds,
        hours_between_interruptions=hours_between_interruptions,
        is_stated=is_stated,
        every_steps=every_steps,
        best_steps=best,
        step_seconds=step_seconds,
    )
