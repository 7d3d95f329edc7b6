"""Sorting by length moves samples between microbatches, or between the steps of a window, and nowhere else."""

import numpy as np
import pytest

from finetune.data.order.by_length import ByLength
from finetune.data.order.order import SetOrder

LENGTHS = np.random.default_rng(5).integers(1, 100, 50)
PLAIN = SetOrder(seed=2, num_samples=50)


def made(steps, *, order=PLAIN):
    return ByLength(order, LENGTHS.__getitem__, seed=2, global_batch_size=8, window_steps=steps)


def steps_of(order, stop=20):
    return [order.samples(8 * step, 8 * step + 8).tolist() for step in range(stop)]


def spread(steps):
    return np.mean([np.ptp(LENGTHS[ids]) for ids in steps])


def test_a_window_of_one_step_alters_no_step():
    assert [sorted(ids) for ids in steps_of(made(1))] == [sorted(ids) for ids in steps_of(PLAIN)]
    assert steps_of(made(1)) != steps_of(PLAIN)


def test_a_step_begins_with_its_longest_sample():
    for ids in steps_of(made(1), stop=6):  # within the first epoch
        assert LENGTHS[ids].tolist() == sorted(LENGTHS[ids].tolist(), reverse=True)


def test_a_wider_window_makes_steps_of_similar_lengths_not_in_the_order_of_length():
    steps = steps_of(made(6), stop=6)
    assert spread(steps) < spread(steps_of(PLAIN, stop=6)) / 2
    longest = [LENGTHS[ids].max() for ids in steps]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("steps", [1, 3, 6, 100])
def test_no_sample_leaves_its_epoch(steps):
    order = made(steps)
    for epoch in range(4):
        assert sorted(order.samples(50 * epoch, 50 * (epoch + 1)).tolist()) == list(range(50))


@pytest.mark.parametrize("steps", [1, 3])
def test_from_any_position_and_in_any_pieces_it_is_the_same(steps):
    whole = made(steps).samples(0, 120).tolist()
    assert [made(steps).samples(at, 120).tolist() for at in range(0, 120, 11)] == [
        whole[at:] for at in range(0, 120, 11)
    ]
    assert [i for ids in made(steps).cut(0, 120, 2) for i in ids.tolist()] == whole


def test_an_order_of_unknown_length_is_sorted_all_the_same():
    class Endless:
        num_positions = None
        samples = PLAIN.samples

    assert sorted(made(2, order=Endless()).samples(0, 16).tolist()) == sorted(PLAIN.samples(0, 16).tolist())
