"""What a run has consumed, as a digest that grows step by step.

Every rank marks the samples that it was really handed, by id and content, the marks are added up in the step's own
reduction, and the sum is rolled into the digest. So it is the same however a step is cut into ranks and microbatches,
and it can be worked out again from the order and the marks that were stored when the samples were made.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from finetune.data.order.order import Order
from finetune.data.order.pool import Pool

_SHIFT = np.uint64(24)  # marks of ids have 40 bits: the sum over 4 million samples fits into 62
_HALF_BITS = 32


def mark(sample_ids: Sequence[int] | np.ndarray, contents: Sequence[int] | np.ndarray) -> int:
    """Return the sum, modulo 2^64, of one number per sample that depends on its id and its content and on no order.

    >>> mark([3, 5], [7, 8]) == (mark([5], [8]) + mark([3], [7])) % 2**64
    True
    """
    both = _mixed(np.asarray(sample_ids, np.uint64)) ^ np.asarray(contents, np.uint64)
    return int(_mixed(both).sum(dtype=np.uint64))


def halves(step_mark: int) -> tuple[int, int]:
    """Return the mark as two numbers that stay exact when those of many ranks are added up as int64."""
    return step_mark & ((1 << _HALF_BITS) - 1), step_mark >> _HALF_BITS


def from_halves(low: int, high: int) -> int:
    """Return the mark of which these are the halves, or sums of them.

    >>> from_halves(*halves(2**64 - 1)) == 2**64 - 1
    True
    """
    return (low + (high << _HALF_BITS)) % (1 << 2 * _HALF_BITS)


def roll(digest: str, step_mark: int) -> str:
    """Return the digest with one more step in it; the first step is rolled onto the empty text."""
    return hashlib.sha256(f"{digest}/{step_mark}".encode()).hexdigest()


def step_mark(pool: Pool, step: int, *, global_batch_size: int) -> int:
    """Return the mark of the samples that the order gives to the step."""
    start = step * global_batch_size
    ids = pool.order.samples(start, start + global_batch_size)
    return mark(ids, pool.samples.marks_of(ids))


def digest_of(pool: Pool, num_steps: int, *, global_batch_size: int) -> str:
    """Return the digest of a run's first `num_steps` steps."""
    digest = ""
    for step in range(num_steps):
        digest = roll(digest, step_mark(pool, step, global_batch_size=global_batch_size))
    return digest


def mark_of_ids(sample_ids: Sequence[int] | np.ndarray) -> int:
    """Return the sum of one 40-bit number per sample id, an exact integer that depends on no order."""
    return int((_mixed(np.asarray(sample_ids, np.uint64)) >> _SHIFT).sum())


def digest_of_ids(order: Order, num_steps: int, *, global_batch_size: int) -> str:
    """Return what stood for the first `num_steps` steps in checkpoints that knew no contents."""
    digest = ""
    for start in range(0, num_steps * global_batch_size, global_batch_size):
        digest = roll(digest, mark_of_ids(order.samples(start, start + global_batch_size)))
    return digest


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers' bits mixed: one output each of splitmix64 (Steele et al., 2014), seeded with the number."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
