"""How often to save when machines are taken away, and what that costs.

Young (1974), "A first order approximation to the optimum checkpoint interval", and Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps". Times in one unit, whichever.
"""

import math


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

    `restart` passes after each failure before the work goes on; `interval` is the computation between checkpoints.

    >>> expected_time(100.0, interval=10.0, save=0.0, restart=0.0, between_failures=1e9) < 100.001
    True
    """
    exponent = (interval + save) / between_failures
    if exponent > 700.0 or restart > 700.0 * between_failures:
        return math.inf
    return between_failures * math.exp(restart / between_failures) * math.expm1(exponent) * work / interval
