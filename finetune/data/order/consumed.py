"""Which samples a run has consumed, as a digest that grows step by step.

Every rank marks the samples that it was really handed, the marks are added up in the step's own reduction, and the sum
is rolled into the digest. So it is the same however a step is cut into ranks and microbatches, and it can be worked
out again from the order alone.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from finetune.data.order.order import Order

_SHIFT = np.uint64(24)  # marks have 40 bits: the sum over 4 million samples fits into 62


def mark(sample_ids: Sequence[int] | np.ndarray) -> int:
    """Return the sum of one 40-bit number per sample id, an exact integer that depends on no order.

    >>> mark([3, 5]) == mark([5]) + mark([3])
    True
    """
    mixed = np.asarray(sample_ids, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele et al., 2014)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(((mixed ^ (mixed >> np.uint64(31))) >> _SHIFT).sum())


def roll(digest: str, step_mark: int) -> str:
    """Return the digest with one more step in it; the first step is rolled onto the empty text."""
    return hashlib.sha256(f"{digest}/{step_mark}".encode()).hexdigest()


def step_mark(order: Order, step: int, *, global_batch_size: int) -> int:
    """Return the mark of the samples that the order gives to the step."""
    start = step * global_batch_size
    return mark(order.samples(start, start + global_batch_size))


def digest_of(order: Order, num_steps: int, *, global_batch_size: int) -> str:
    """Return the digest of a run's first `num_steps` steps."""
    digest = ""
    for step in range(num_steps):
        digest = roll(digest, step_mark(order, step, global_batch_size=global_batch_size))
    return digest
