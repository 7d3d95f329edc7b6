"""How values are spread: bars and quantiles, small enough to be written down."""

from dataclasses import dataclass

import numpy as np

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Histogram:
    """Bars of equal width; bar i holds the values in [edges[i], edges[i + 1]), the last one its upper edge too."""

    edges: tuple[float, ...]  # one more than there are bars
    bars: tuple[int, ...]


def histogram(values: np.ndarray, *, upper: float, num_bars: int) -> Histogram:
    """Return the values from 0 to `upper` in so many bars."""
    bars, edges = np.histogram(values, bins=num_bars, range=(0.0, upper))
    return Histogram(tuple(round(float(edge), 6) for edge in edges), tuple(int(bar) for bar in bars))


def length_histogram(lengths: np.ndarray, *, most_bars: int = 32) -> Histogram:
    """Return the lengths in bars of a whole number of tokens each; no bar where there is no length."""
    longest = int(lengths.max()) if len(lengths) else 0
    width = -(-(longest + 1) // most_bars)
    num_bars = -(-(longest + 1) // width)
    return histogram(lengths, upper=width * num_bars, num_bars=num_bars)


def quantiles(values: np.ndarray) -> dict[str, int]:
    """Return the smallest, the largest and some in between, each a value that occurs; empty where there is none.

    >>> quantiles(np.array([1, 2, 3, 4]))["p50"]
    2
    """
    if not len(values):
        return {}
    found = np.quantile(values, QUANTILES, method="inverted_cdf")
    return {f"p{100 * share:g}": int(value) for share, value in zip(QUANTILES, found, strict=True)}
