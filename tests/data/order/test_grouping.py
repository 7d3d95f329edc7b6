"""Packs are as full as best fit decreasing makes them, and batches by tokens stay within their budget."""

from functools import partial

import numpy as np
import pytest

from finetune.config.sections.data import BatchingSection
from finetune.data.order.order import (
    GroupedOrder,
    LengthGroupedOrder,
    SetOrder,
    batches_by_tokens,
    best_fit_decreasing,
    set_order,
    steps_for_tokens,
)


def lists(groups):
    return [groups.members[a:b].tolist() for a, b in zip(groups.starts[:-1], groups.starts[1:], strict=True)]


def plainly(lengths, budget):
    """Best fit decreasing as the textbook has it, one sample after the other: the sum of each pack."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(budget - length)
    return sorted(rooms)


def lengths_of(kind, size):
    draw = np.random.default_rng(3)
    return {
        "spread": draw.integers(1, 65, size),
        "few": draw.choice([1, 7, 32, 33, 64], size),
        "short": draw.integers(1, 4, size),
    }[kind]


@pytest.mark.parametrize("kind", ["spread", "few", "short"])
@pytest.mark.parametrize("size", [1, 10, 500])
def test_the_packs_are_those_of_the_textbook(kind, size):
    lengths = lengths_of(kind, size)
    packs = lists(best_fit_decreasing(lengths, budget=64))
    assert sorted(i for pack in packs for i in pack) == list(range(size))
    assert sorted(64 - lengths[pack].sum() for pack in packs) == plainly(lengths.tolist(), 64)


@pytest.mark.parametrize("kind", ["spread", "few", "short"])
def test_a_batch_by_tokens_is_within_its_budget_when_padded_and_no_other_sample_fits(kind):
    lengths = lengths_of(kind, 300)
    batches = lists(batches_by_tokens(lengths, budget=64))
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    assert all(len(batch) * lengths[batch].max() <= 64 for batch in batches)
    assert all((len(batch) + 1) * lengths[batch].max() > 64 for batch in batches[:-1])


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own():
    assert sorted(map(len, lists(batches_by_tokens(np.array([100, 20, 90, 30]), budget=64)))) == [1, 1, 2]


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


def test_unshuffled_packs_follow_their_first_samples():
    order = made(shuffle=False)
    firsts = [min(group) for group in positions(order, 0, order.num_positions)]
    assert firsts == sorted(firsts)
    assert positions(order, 0, 9) == positions(order, order.num_positions, order.num_positions + 9)


def test_the_batching_section_decides_what_a_position_holds():
    def order_by(**keys):
        return set_order(LENGTHS, seed=1, shuffle=True, batching=BatchingSection(**keys), max_length=32)

    assert order_by() == SetOrder(seed=1, num_positions=200)
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


LENGTHS_by_length = np.random.default_rng(5).integers(1, 100, 50)
PLAIN = SetOrder(seed=2, num_positions=50)


def made_by_length(steps, *, order=PLAIN):
    return LengthGroupedOrder(order, LENGTHS_by_length.__getitem__, seed=2, global_batch_size=8, window_steps=steps)


def steps_of(order, stop=20):
    return [order.samples(8 * step, 8 * step + 8).tolist() for step in range(stop)]


def spread(steps):
    return np.mean([np.ptp(LENGTHS_by_length[ids]) for ids in steps])


def test_a_wider_window_makes_steps_of_similar_lengths_not_in_the_order_of_length():
    steps = steps_of(made_by_length(6), stop=6)
    assert spread(steps) < spread(steps_of(PLAIN, stop=6)) / 2
    longest = [LENGTHS_by_length[ids].max() for ids in steps]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("steps", [1, 3, 6, 100])
def test_no_sample_leaves_its_epoch(steps):
    order = made_by_length(steps)
    for epoch in range(4):
        assert sorted(order.samples(50 * epoch, 50 * (epoch + 1)).tolist()) == list(range(50))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_grouped_order_is_the_same_from_any_position_in_any_pieces(steps):
    whole = made_by_length(steps).samples(0, 120).tolist()
    assert [made_by_length(steps).samples(at, 120).tolist() for at in range(0, 120, 11)] == [
        whole[at:] for at in range(0, 120, 11)
    ]
    assert [i for ids in made_by_length(steps).cut(0, 120, 2) for i in ids.tolist()] == whole
