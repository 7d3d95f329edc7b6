"""Layer stacks are found, compared and shortened."""

import pytest
from torch import nn

from finetune.model.layers import (
    LayerStack,
    fewest_layers,
    find_stacks,
    layer_index,
    layer_lists,
    output_modules,
    shorten_config,
    with_layers,
    with_one_more,
)


class Layer(nn.Module):
    def __init__(self, index, *, width=2, is_local=False):
        super().__init__()
        self.layer_idx = index
        self.is_local = is_local
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])


def model_of(*layers):
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model


def test_layers_are_compared_by_class_parameters_and_switches_but_not_by_index():
    (stack,) = find_stacks(model_of(*(Layer(n, is_local=n % 2 == 0) for n in range(4))), with_sizes=False)
    assert (stack.name, len(stack.kinds), len(set(stack.kinds))) == ("layers", 4, 2)
    assert stack.kinds[0] == stack.kinds[2]


@pytest.mark.parametrize(("with_sizes", "num_kinds"), [(False, 1), (True, 2)])
def test_layers_of_other_widths_are_alike_only_without_sizes(with_sizes, num_kinds):
    (stack,) = find_stacks(model_of(Layer(0), Layer(1), Layer(2, width=4)), with_sizes=with_sizes)
    assert len(set(stack.kinds)) == num_kinds


def test_the_index_of_a_layer_is_that_of_the_outermost_list():
    model = nn.Module()
    model.encoder, model.decoder, model.lists = model_of(Layer(0), Layer(1)), model_of(Layer(0)), nn.ModuleList()
    assert list(layer_lists(model)) == ["encoder.layers", "decoder.layers"]
    names = ("encoder.layers.1.experts.2.weight", "decoder.layers.0", "encoder.layers", "encoder.layers_1.0.weight")
    assert [layer_index(name, layer_lists(model)) for name in names] == [1, 0, None, None]


def test_outputs_are_those_of_embeddings_layers_and_the_norm_next_to_them():
    model = nn.Module()
    model.body = model_of(Layer(0), Layer(1))
    model.body.embed, model.body.rotary, model.body.norm = nn.Embedding(4, 2), nn.Identity(), nn.LayerNorm(2)
    model.head, model.embeddings = nn.Linear(2, 4), nn.Embedding(4, 2)
    model.get_input_embeddings = lambda: model.embeddings
    names = ["body.layers.0", "body.layers.1", "body.embed", "body.norm", "embeddings"]
    assert list(output_modules(model)) == names


def test_the_fewest_layers_include_every_kind_and_are_enlarged_one_kind_at_a_time():
    stack = LayerStack("layers", ("a", "a", "b", "a", "b"))
    kept = fewest_layers([stack])
    assert kept == {"layers": [0, 2]}
    assert list(with_one_more([stack], kept)) == [(2, {"layers": [0, 1, 2]}), (1, {"layers": [0, 2, 4]})]
    assert fewest_layers([LayerStack("layers", ("a", "a", "a"))]) == {"layers": [0, 1]}


def test_a_model_with_fewer_layers_has_them_renumbered_and_the_whole_model_is_unchanged():
    model = model_of(*(Layer(n) for n in range(5)))
    small = with_layers(model, {"layers": [0, 3]})
    assert [layer.layer_idx for layer in small.layers] == [0, 1]
    assert [layer.layer_idx for layer in model.layers] == [0, 1, 2, 3, 4]


def test_a_config_is_shortened_in_counts_lists_and_indices():
    values = {
        "num_hidden_layers": 4,
        "vocab_size": 4000,
        "layer_types": ["a", "b", "c", "d"],
        "hybrid_override_pattern": "M*-M",
        "mlp_only_layers": [3],
        "attention_types": [[["global", "local"], 2]],
    }
    shorten_config(values, (0, 3), lengths={4})
    assert values == {
        "num_hidden_layers": 2,
        "vocab_size": 4000,
        "layer_types": ["a", "d"],
        "hybrid_override_pattern": "MM",
        "mlp_only_layers": [1],
        "attention_types": [[["global", "local"], 1]],
    }
