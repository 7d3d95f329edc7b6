"""What was consumed, as a digest: the same however a step is cut, another one when a single sample is another."""

import hashlib

from finetune.data.order.consumed import digest_of, mark, roll, step_mark
from finetune.data.order.order import SetOrder


def test_the_mark_of_a_step_is_the_sum_of_what_its_ranks_were_handed():
    order = SetOrder(seed=1, num_samples=50)
    ids = order.samples(8, 16).tolist()
    assert step_mark(order, 1, global_batch_size=8) == mark(ids[::2]) + mark(ids[1::2]) == mark(ids[::-1])
    assert mark([*ids[:-1], ids[-1] + 1]) != mark(ids)
    assert mark([]) == 0


def test_the_digest_rolls_on_step_by_step_and_into_the_next_epoch():
    order = SetOrder(seed=1, num_samples=10)
    digest = ""
    for step in range(5):
        digest = roll(digest, step_mark(order, step, global_batch_size=4))
    assert digest == digest_of(order, 5, global_batch_size=4)
    assert digest != digest_of(SetOrder(seed=2, num_samples=10), 5, global_batch_size=4)
    assert digest_of(order, 0, global_batch_size=4) == ""


def test_a_mark_is_the_same_on_every_machine_and_in_every_year():
    assert mark([0]) == 0xE220A8397B1DCDAF >> 24  # the first output of splitmix64 seeded with 0
    assert roll("", mark([0])) == hashlib.sha256(f"/{0xE220A8397B1DCDAF >> 24}".encode()).hexdigest()
