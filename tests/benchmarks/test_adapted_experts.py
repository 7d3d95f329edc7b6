"""Adapters of experts as grouped products take less arithmetic and memory than peft's, at the same loss."""

import adapted_experts
import pytest


@pytest.mark.parametrize("name", adapted_experts.SHAPES)
def test_grouped_adapters_take_fewer_flops_and_less_memory(name):
    values = {**adapted_experts.SHAPES[name], "hidden_size": 64}
    theirs, ours = (
        adapted_experts.measure(adapted_experts.adapted_model(values, is_grouped=is_grouped), num_tokens=64)
        for is_grouped in (False, True)
    )
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert ours.flops < 0.9 * theirs.flops
    assert ours.memory < 0.9 * theirs.memory
    assert ours.operators < 1.1 * theirs.operators  # of products that are smaller
