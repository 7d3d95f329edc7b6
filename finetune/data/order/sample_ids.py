"""Ids of samples: which source, which window of a stream, which sample in it, in one whole number.

A job with one source that is no stream has the ids 0, 1, 2, ..., the places in its prepared set.
"""

from typing import NamedTuple

import numpy as np

INDEX_BITS, WINDOW_BITS = 24, 24
"""A window of a stream has up to 16 million samples, a stream up to 16 million windows."""


class Place(NamedTuple):
    """Where a sample stands: in a prepared set, which is no stream, the window is 0 and the index may be any."""

    source: int
    within: int  # the id that the sample has in its source alone


def of_source(source: int) -> int:
    """Return what is added to the ids that the samples of this source have in it alone."""
    return source << (INDEX_BITS + WINDOW_BITS)


def of_window(window: int) -> int:
    """Return what is added to the index that a sample has in this window of its stream."""
    return window << INDEX_BITS


def place_of(sample_id: int) -> Place:
    """Return the source of the id and the id within it.

    >>> place_of(of_source(2) + 7)
    Place(source=2, within=7)
    """
    source = sample_id >> (INDEX_BITS + WINDOW_BITS)
    return Place(source, sample_id - of_source(source))


def sources_of(sample_ids: np.ndarray) -> np.ndarray:
    """Return the source of each id."""
    return sample_ids >> (INDEX_BITS + WINDOW_BITS)


def in_window(within: int) -> tuple[int, int]:
    """Return the window of a stream's sample, and its index in that window.

    >>> in_window(of_window(2) + 7)
    (2, 7)
    """
    return within >> INDEX_BITS, within & ((1 << INDEX_BITS) - 1)
