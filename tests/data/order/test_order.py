"""The order is a function of seed, epoch and position, and of nothing else."""

import numpy as np
import pytest

from finetune.data.order.order import SetOrder, steps_for_tokens


@pytest.mark.parametrize("num_samples", [1, 7, 100])
def test_every_epoch_holds_every_sample_once(num_samples):
    order = SetOrder(seed=1, num_positions=num_samples)
    for epoch in range(4):
        samples = order.samples(epoch * num_samples, (epoch + 1) * num_samples)
        assert sorted(samples.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_differ():
    def first_two(seed):
        order = SetOrder(seed=seed, num_positions=50)
        return order.samples(0, 50).tolist(), order.samples(50, 100).tolist()

    assert first_two(1)[0] != first_two(1)[1]
    assert first_two(1)[0] != first_two(2)[0]
    assert first_two(1) == first_two(1)


def test_from_any_position_the_rest_is_the_same():
    order = SetOrder(seed=3, num_positions=11)
    whole = order.samples(0, 40).tolist()
    for position in range(41):
        assert order.samples(position, 40).tolist() == whole[position:]


def test_without_shuffling_rows_follow_one_another():
    assert SetOrder(seed=3, num_positions=3, shuffle=False).samples(1, 8).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_the_order_is_the_same_on_every_machine_and_version():
    assert SetOrder(seed=42, num_positions=10).samples(0, 10).tolist() == PINNED


PINNED = [9, 2, 8, 7, 0, 5, 6, 1, 3, 4]


def count_steps(lengths, order, tokens):
    epoch_tokens = int(lengths.sum())
    return steps_for_tokens(order, lengths.__getitem__, epoch_tokens=epoch_tokens, global_batch_size=4, tokens=tokens)


def plainly(lengths, order, size, tokens):
    seen = step = 0
    while seen < tokens:
        seen += sum(lengths[i] for i in order.samples(step * size, (step + 1) * size))
        step += 1
    return step


@pytest.mark.parametrize("tokens", [1, 10, 99, 275, 276, 277, 1000, 4567])
def test_steps_for_tokens_equals_counting_them(tokens):
    lengths = np.arange(1, 24)
    order = SetOrder(seed=5, num_positions=23)
    assert count_steps(lengths, order, tokens) == plainly(lengths, order, 4, tokens)


def test_a_budget_met_exactly_takes_no_further_step():
    order = SetOrder(seed=5, num_positions=8)
    assert count_steps(np.full(8, 10), order, 80) == 2
    assert count_steps(np.full(8, 10), order, 81) == 3
