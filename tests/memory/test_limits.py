"""The size that fits is found from the memory of smaller ones, without trying one that does not fit."""

from types import SimpleNamespace

import numpy as np
import pytest

from finetune.data.order.order import GroupedOrder, LengthGroupedOrder, SetOrder, best_fit_decreasing
from finetune.memory.limits import MARGIN, MemoryLimits, _longest_of_groups, _longest_of_samples, is_out_of_memory


def search(sizes, limits, memory):
    """Return the size that is found and the sizes that were tried; `memory` gives the peaks of a size."""
    measured = {}
    while (size := limits.next_size(sizes, measured)) is not None:
        assert size not in measured
        measured[size] = memory(size)
    return limits.largest_fitting(measured), list(measured)


def affine(base, each):
    return lambda size: (base + each * size,)


POWERS = (1, 2, 4, 8, 16, 32, 64)
ODD = (1, 3, 5, 15)


@pytest.mark.parametrize("sizes", [POWERS, ODD, (1, 7), (5,), tuple(range(1, 61))])
@pytest.mark.parametrize("limit", [150, 160, 200, 333, 500, 900, 1700, 10_000])
def test_the_largest_size_that_leaves_the_margin_is_found_and_none_above_the_limit_is_tried(sizes, limit):
    limits = MemoryLimits((140,), (limit,))
    memory = affine(140, 10)
    found, tried = search(sizes, limits, memory)
    fitting = [size for size in sizes if memory(size)[0] <= limit - MARGIN * (limit - 140)]
    assert found == max(fitting, default=None)
    assert all(memory(size)[0] <= limit for size in tried[1:])
    assert len(tried) <= 8


def test_the_rank_with_the_least_room_decides():
    limits = MemoryLimits((140, 140), (10_000, 300))
    found, _ = search(POWERS, limits, lambda size: (140 + 10 * size, 140 + 10 * size))
    assert found == 8  # 220 of 300; 16 would take all of them


def test_each_kind_of_memory_counts():
    limits = MemoryLimits((0, 0), (1000, 100))
    found, tried = search(POWERS, limits, lambda size: (10 * size, 20 + 2 * size))
    assert (found, max(tried)) == (32, 32)


def test_memory_that_grows_faster_than_measured_is_noticed_before_the_limit():
    limits = MemoryLimits((0,), (1000,))
    found, tried = search(POWERS, limits, lambda size: (size * size,))
    assert (found, max(tried)) == (16, 16)


def test_the_smallest_size_may_not_fit():
    assert search(POWERS, MemoryLimits((0,), (100,)), lambda size: None) == (None, [1])


def test_a_size_that_was_out_of_memory_is_not_exceeded():
    limits = MemoryLimits((0,), (1000,))
    assert search(POWERS, limits, lambda size: (size,) if size <= 8 else None)[0] == 8


def test_one_measured_size_is_extrapolated_in_proportion():
    assert MemoryLimits((100,), (1000,)).predict(4, {1: (150,)}) == (300,)
    assert MemoryLimits((100,), (1000,)).predict(4, {1: (150,), 2: (160,)}) == (180,)


@pytest.mark.parametrize(
    ("text", "is_of_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", False),
    ],
)
def test_a_workspace_that_cannot_be_allocated_is_a_lack_of_memory(text, is_of_memory):
    assert is_out_of_memory(RuntimeError(text)) is is_of_memory


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
