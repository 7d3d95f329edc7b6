"""Packs and batches by tokens as an order: every epoch whole, and a function of seed and position alone."""

from functools import partial

import numpy as np
import pytest

from finetune.config.sections.data import BatchingSection
from finetune.data.order.order import SetOrder, steps_for_tokens
from finetune.data.order.packing import batches_by_tokens, best_fit_decreasing
from finetune.data.order.set_order import GroupedOrder, set_order

LENGTHS = np.arange(200) * 37 % 31 + 2
KINDS = {"packs": best_fit_decreasing, "tokens": batches_by_tokens}


def made(by="packs", *, seed=1, shuffle=True, window_samples=1000):
    grouping = partial(KINDS[by], budget=32)
    return GroupedOrder(LENGTHS, grouping, seed=seed, shuffle=shuffle, window_samples=window_samples)


def positions(order, start, stop):
    return [tuple(ids.tolist()) for ids in order.cut(start, stop, 1)]


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("window_samples", [1000, 60])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_holds_every_sample_once_in_as_many_groups(by, window_samples, shuffle):
    order = made(by, window_samples=window_samples, shuffle=shuffle)
    num = order.num_positions
    for epoch in range(3):
        assert sorted(order.samples(epoch * num, (epoch + 1) * num).tolist()) == list(range(200))
    groups = positions(order, 0, num)
    assert len(groups) == num < 200
    assert all(LENGTHS[list(group)].sum() <= 32 for group in groups)


def test_epochs_and_seeds_differ_and_a_seed_does_not():
    order, num = made(), made().num_positions
    assert positions(order, 0, num) != positions(order, num, 2 * num)
    assert positions(order, 0, num) != positions(made(seed=2), 0, num)
    assert positions(order, 0, num) == positions(made(), 0, num)


@pytest.mark.parametrize("window_samples", [1000, 60])
def test_from_any_position_the_rest_is_the_same(window_samples):
    order = made(window_samples=window_samples)
    num = order.num_positions
    whole = positions(order, 0, 2 * num + 3)
    for start in range(0, 2 * num, 7):
        assert positions(made(window_samples=window_samples), start, 2 * num + 3) == whole[start:]


def test_pieces_hold_whole_groups_in_their_order():
    order = made()
    singles = positions(order, 5, 12)
    threes = [tuple(ids.tolist()) for ids in order.cut(5, 12, 3)]
    assert threes == [sum(singles[0:3], ()), sum(singles[3:6], ()), singles[6]]


def test_unshuffled_packs_follow_their_first_samples():
    order = made(shuffle=False)
    firsts = [min(group) for group in positions(order, 0, order.num_positions)]
    assert firsts == sorted(firsts)
    assert positions(order, 0, 9) == positions(order, order.num_positions, order.num_positions + 9)


def test_the_section_says_what_stands_at_a_position():
    def order_by(**keys):
        return set_order(LENGTHS, seed=1, shuffle=True, batching=BatchingSection(**keys), max_length=32)

    assert order_by() == SetOrder(seed=1, num_samples=200)
    assert order_by(by="packs").num_positions == made("packs").num_positions
    assert order_by(by="tokens", tokens=64).num_positions == batches_by_tokens(LENGTHS, budget=64).num_groups


def test_the_packs_are_the_same_on_every_machine_and_version():
    assert positions(made(), 0, 3) == PINNED


PINNED = [(71, 130), (1, 76), (9, 99)]


@pytest.mark.parametrize("tokens", [1, 500, int(LENGTHS.sum()), int(LENGTHS.sum()) + 1, 12_345])
def test_a_budget_of_tokens_is_counted_over_packs_too(tokens):
    order, seen, step = made(), 0, 0
    while seen < tokens:
        seen += LENGTHS[order.samples(step * 7, step * 7 + 7)].sum()
        step += 1
    count = partial(steps_for_tokens, order, LENGTHS.__getitem__, global_batch_size=7, tokens=tokens)
    assert count(epoch_tokens=int(LENGTHS.sum())) == count(epoch_tokens=None) == step


def test_a_set_without_samples_has_no_position():
    assert set_order(np.zeros(0, np.int64), seed=1, shuffle=True, batching=BatchingSection(by="packs"), max_length=8)
