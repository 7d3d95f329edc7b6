"""How often to save when machines are taken away, and what that costs.

Young (1974), "A first order approximation to the optimum checkpoint interval", and Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps". Times in one unit, whichever.
"""

import math
from dataclasses import dataclass

MIN_INTERVAL_SECONDS = 300.0
"""Between two checkpoints: more of them gain next to nothing, and each is a folder. Less where failures are frequent: a
twentieth of the time between them."""

_CLOSE = 2.0
"""By this factor the interval may be off the best one: the optimum is flat, and a quarter of the loss is added."""

_CHEAP = 0.005
"""Of the steps' time: saving more often than necessary at less cost than this is not a loss."""


def young_interval(*, save: float, between_failures: float) -> float:
    """Return the computation between two checkpoints that loses least: `sqrt(2 save x between_failures)`.

    >>> round(young_interval(save=5, between_failures=1440))  # minutes: a day between failures, 5 to save
    120
    """
    return math.sqrt(2.0 * save * between_failures)


def daly_interval(*, save: float, between_failures: float) -> float:
    """Return the same by Daly's equation 37, right also where saving takes a good part of the time between failures.

    >>> round(daly_interval(save=5, between_failures=1440), 1)
    116.7
    """
    if save >= 2.0 * between_failures:
        return between_failures
    ratio = save / (2.0 * between_failures)
    return (
        young_interval(save=save, between_failures=between_failures) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0)
        - save
    )


def expected_time(work: float, *, interval: float, save: float, restart: float, between_failures: float) -> float:
    """Return how long `work` takes with failures, by Daly's equation 20 (exponential times between them).

    `restart` passes after each failure before the work continues; `interval` is the computation between checkpoints.

    >>> expected_time(100.0, interval=10.0, save=0.0, restart=0.0, between_failures=1e9) < 100.001
    True
    """
    exponent = (interval + save) / between_failures
    if exponent > 700.0 or restart > 700.0 * between_failures:
        return math.inf
    return between_failures * math.exp(restart / between_failures) * math.expm1(exponent) * work / interval


def best_interval(*, save: float, write: float, between_failures: float) -> float:
    """Return Daly's interval in seconds, unless writing in the background takes longer or it is pointlessly short."""
    least = max(write, min(MIN_INTERVAL_SECONDS, between_failures / 20))  # the one before must be written by then
    return max(daly_interval(save=save, between_failures=between_failures), least)


@dataclass(frozen=True)
class IntervalAdvice:
    """How often to save, from what a save and a step have taken; `every_steps` is what the job has, None only the end.

    An interruption loses half of an interval on average.
    """

    save_seconds: float
    hours_between_interruptions: float
    is_stated: bool  # by the user; else observed
    every_steps: int | None
    best_steps: int
    step_seconds: float

    @property
    def lost_seconds(self) -> float | None:
        """Return what an interruption loses as the job is; None where it saves only at the end."""
        return None if self.every_steps is None else self.every_steps * self.step_seconds / 2

    @property
    def best_lost_seconds(self) -> float:
        """Return what an interruption loses with the best interval."""
        return self.best_steps * self.step_seconds / 2

    @property
    def save_share(self) -> float:
        """Return the share of the steps' time that saving adds as the job is."""
        return 0.0 if self.every_steps is None else self.save_seconds / (self.every_steps * self.step_seconds)

    @property
    def best_save_share(self) -> float:
        """Return the same with the best interval."""
        return self.save_seconds / (self.best_steps * self.step_seconds)

    @property
    def is_right(self) -> bool:
        """Return whether another interval would gain next to nothing."""
        if self.every_steps is None:
            return False
        is_cheap = self.every_steps < self.best_steps and self.save_share < _CHEAP
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
    """Return the advice; None where something was not measured: a step or a time without a length."""
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
