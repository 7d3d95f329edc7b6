"""What was consumed, as a digest: the same however a step is cut, another one when a single sample is another."""

import hashlib
from dataclasses import dataclass

import numpy as np

from finetune.data.order.consumed import (
    digest_of,
    digest_of_ids,
    from_halves,
    halves,
    mark,
    mark_of_ids,
    roll,
    step_mark,
)
from finetune.data.order.order import SetOrder
from finetune.data.order.pool import Pool


@dataclass(frozen=True)
class Marked:
    """Samples of which nothing is known but their marks."""

    marks: np.ndarray

    def marks_of(self, sample_ids):
        return self.marks[sample_ids]


def pool_of(num_samples, *, seed=1, changed=None):
    marks = np.arange(num_samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    if changed is not None:
        marks[changed] ^= np.uint64(1)
    return Pool(Marked(marks), SetOrder(seed=seed, num_samples=num_samples), "f")


def test_the_mark_of_a_step_is_the_sum_of_what_its_ranks_were_handed():
    pool = pool_of(50)
    ids = pool.order.samples(8, 16)
    marks = pool.samples.marks_of(ids)
    ranks = [mark(ids[start::2], marks[start::2]) for start in (0, 1)]
    sums = [sum(halves(each)[half] for each in ranks) for half in (0, 1)]
    assert step_mark(pool, 1, global_batch_size=8) == from_halves(*sums) == mark(ids[::-1], marks[::-1])
    assert mark([*ids[:-1], ids[-1] + 1], marks) != mark(ids, marks)
    assert mark([], []) == 0


def test_samples_that_have_changed_places_or_contents_have_another_mark():
    assert mark([3, 5], [7, 8]) != mark([3, 5], [8, 7])
    assert mark([3, 5], [7, 8]) != mark([3, 5], [7, 9])


def test_the_sum_of_a_thousand_ranks_is_exact_in_64_bits():
    each = 2**64 - 1
    low, high = (1000 * half for half in halves(each))
    assert max(low, high) < 2**63
    assert from_halves(low, high) == 1000 * each % 2**64


def test_the_digest_rolls_on_step_by_step_and_into_the_next_epoch():
    pool = pool_of(10)
    digest = ""
    for step in range(5):
        digest = roll(digest, step_mark(pool, step, global_batch_size=4))
    assert digest == digest_of(pool, 5, global_batch_size=4)
    assert digest != digest_of(pool_of(10, seed=2), 5, global_batch_size=4)
    assert digest_of(pool, 0, global_batch_size=4) == ""


def test_one_bit_in_a_sample_that_was_consumed_changes_the_digest():
    pool = pool_of(10)
    first, later = pool.order.samples(0, 1)[0], pool.order.samples(9, 10)[0]
    digest = digest_of(pool, 2, global_batch_size=4)
    assert digest_of(pool_of(10, changed=first), 2, global_batch_size=4) != digest
    assert digest_of(pool_of(10, changed=later), 2, global_batch_size=4) == digest, "it has not been consumed yet"


def test_the_marks_of_older_checkpoints_are_what_they_were():
    assert mark_of_ids([0]) == 0xE220A8397B1DCDAF >> 24  # the first output of splitmix64 seeded with 0
    digest = hashlib.sha256(f"/{0xE220A8397B1DCDAF >> 24}".encode()).hexdigest()
    assert (
        digest_of_ids(SetOrder(seed=1, num_samples=1), 1, global_batch_size=1) == roll("", mark_of_ids([0])) == digest
    )


def test_a_mark_is_the_same_on_every_machine_and_in_every_year():
    assert mark([0], [0]) == 0xA706DD2F4D197E6F  # splitmix64 seeded with its own first output
