"""Marks of samples: 64 bits of what a sample is, stored when it is made and made again of what is delivered.

The mark of several arrays is the sum of theirs, modulo 2^64, so that what is known of a sample beside it can be told
from the sample itself.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash

_BITS = (1 << 64) - 1


def mark_of(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the mark of a sample's arrays: of their names, types and values.

    >>> both = mark_of({"a": np.arange(3), "b": np.arange(2)})
    >>> both == (mark_of({"a": np.arange(3)}) + mark_of({"b": np.arange(2)})) % 2**64
    True
    """
    return sum(_mark(name, array) for name, array in arrays.items()) & _BITS


def marks_of(values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], *, num_samples: int) -> np.ndarray:
    """Return the marks (uint64) of samples that stand end to end in the arrays."""
    total = np.zeros(num_samples, np.uint64)
    for name, array in values.items():
        ends = accumulate(lengths[name].tolist(), initial=0)
        total += np.array([_mark(name, array[start:stop]) for start, stop in pairwise(ends)], np.uint64)
    return total


def _mark(name: str, array: Any) -> int:
    return xxhash.xxh3_64_intdigest(array, _seed(name, array.dtype))


@lru_cache(maxsize=256)
def _seed(name: str, dtype: np.dtype[Any]) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {dtype.str}".encode())
