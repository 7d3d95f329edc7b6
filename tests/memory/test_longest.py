"""The microbatch with the most positions is found, and delivered as its step delivers it."""

from types import SimpleNamespace

import numpy as np
import pytest

from finetune.data.order.grouping import GroupedOrder, LengthGroupedOrder, best_fit_decreasing
from finetune.data.order.order import SetOrder
from finetune.memory.limits import _longest_of_groups, _longest_of_samples

LENGTHS = np.array([5, 9, 2, 7, 30, 4, 8, 6, 3, 11, 10, 12])


def view(order):
    return SimpleNamespace(order=order, samples=SimpleNamespace(lengths_of=lambda ids: LENGTHS[ids]))


def every(order, *, steps, size):
    return [LENGTHS[ids] for ids in order.cut(0, steps * 4, size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("window_steps", [0, 1, 3])
@pytest.mark.parametrize("is_row", [True, False])
def test_the_longest_of_all_microbatches_is_found(size, window_steps, is_row):
    order = SetOrder(seed=3, num_positions=len(LENGTHS))
    if window_steps:
        order = LengthGroupedOrder(
            order, lambda ids: LENGTHS[ids], seed=3, global_batch_size=4, window_steps=window_steps
        )
    step, ids = _longest_of_samples(view(order), range(7), size, 4, is_row)[0]
    each = every(order, steps=7, size=size)
    measure = np.sum if is_row else np.max
    assert measure(LENGTHS[ids]) == max(measure(lengths) for lengths in each)
    assert set(ids) <= set(order.samples(4 * step, 4 * step + 4))


def test_only_the_steps_to_come_count():
    order = SetOrder(seed=0, num_positions=len(LENGTHS), shuffle=False)
    step, ids = _longest_of_samples(view(order), range(2, 3), 2, 4, False)[0]
    assert (step, LENGTHS[ids].max()) == (2, 12)


def test_the_fullest_packs_are_found():
    order = GroupedOrder(LENGTHS, lambda lengths: best_fit_decreasing(lengths, budget=30), seed=0, shuffle=True)
    _, ids = _longest_of_groups(view(order), range(2), 1, 2, True)[0]
    assert LENGTHS[ids].sum() == 30
