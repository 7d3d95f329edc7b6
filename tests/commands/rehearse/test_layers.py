"""Which layers stand for those of the real model."""

import doctest

from torch import nn

from finetune.commands.rehearse import layers
from finetune.commands.rehearse.layers import Stack, find_stacks, kept_layers, map_index


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(layers).failed == 0


def test_every_kind_of_layer_is_kept_at_least_once():
    kinds = ["dense", *["moe"] * 60]
    assert kept_layers(kinds, can_pick=False) == (0, 1)
    late = [*["global"] * 30, "local"]
    assert kept_layers(late, can_pick=True) == (0, 30)
    assert kept_layers(late, can_pick=False) == tuple(range(31))


def test_a_model_of_one_layer_keeps_it():
    assert kept_layers(["only"], can_pick=False) == (0,)


def test_a_layer_is_mapped_to_one_of_its_kind_and_depth():
    real, small = ["a", "b"] * 8, ["a", "b"]
    assert [map_index(each, real=real, small=small) for each in (0, 14, 1, 15)] == [0, 0, 1, 1]


def test_layers_differ_by_class_parameters_and_switches():
    class Layer(nn.Module):
        def __init__(self, *, is_local: bool) -> None:
            super().__init__()
            self.is_local = is_local
            self.inner = nn.Linear(2, 2)

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(is_local=n % 2 == 0) for n in range(4)])
    (stack,) = find_stacks(model)
    assert (stack.name, len(stack.kinds), len(set(stack.kinds))) == ("layers", 4, 2)
    assert stack == Stack("layers", stack.kinds)
