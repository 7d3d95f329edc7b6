"""Packs are as full as best fit decreasing makes them, and batches by tokens stay within their budget."""

import numpy as np
import pytest

from finetune.data.order.packing import batches_by_tokens, best_fit_decreasing


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


def test_samples_share_a_pack_where_the_least_room_is_left():
    assert lists(best_fit_decreasing(np.array([6, 5, 5, 3, 1]), budget=10)) == [[0, 3, 4], [1, 2]]


@pytest.mark.parametrize("kind", ["spread", "few", "short"])
@pytest.mark.parametrize("size", [1, 10, 500])
def test_the_packs_are_those_of_the_textbook(kind, size):
    lengths = lengths_of(kind, size)
    packs = lists(best_fit_decreasing(lengths, budget=64))
    assert sorted(i for pack in packs for i in pack) == list(range(size))
    assert sorted(64 - lengths[pack].sum() for pack in packs) == plainly(lengths.tolist(), 64)


def test_how_many_packs_there_are_follows_from_the_lengths_alone():
    lengths = lengths_of("spread", 500)
    shuffled = np.random.default_rng(1).permutation(lengths)
    assert best_fit_decreasing(lengths, budget=64).num_groups == best_fit_decreasing(shuffled, budget=64).num_groups
    assert batches_by_tokens(lengths, budget=64).num_groups == batches_by_tokens(shuffled, budget=64).num_groups


def test_a_million_samples_are_nearly_free_of_waste():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 0.8, 1_000_000).astype(np.int64) + 1, 4096)
    packs = best_fit_decreasing(lengths, budget=4096)
    assert lengths.sum() / (packs.num_groups * 4096) > 0.999
    assert np.add.reduceat(lengths[packs.members], packs.starts[:-1]).max() <= 4096


def test_a_sample_beyond_the_budget_is_an_error_of_ours():
    with pytest.raises(ValueError, match="a sample of 11 tokens in packs of 10"):
        best_fit_decreasing(np.array([3, 11]), budget=10)


@pytest.mark.parametrize("kind", ["spread", "few", "short"])
def test_a_batch_by_tokens_is_within_its_budget_when_padded_and_no_other_sample_fits(kind):
    lengths = lengths_of(kind, 300)
    batches = lists(batches_by_tokens(lengths, budget=64))
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    assert all(len(batch) * lengths[batch].max() <= 64 for batch in batches)
    assert all((len(batch) + 1) * lengths[batch].max() > 64 for batch in batches[:-1])


def test_no_samples_make_no_groups():
    nothing = np.zeros(0, np.int64)
    assert best_fit_decreasing(nothing, budget=8).num_groups == batches_by_tokens(nothing, budget=8).num_groups == 0


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own():
    assert sorted(map(len, lists(batches_by_tokens(np.array([100, 20, 90, 30]), budget=64)))) == [1, 1, 2]
