"""Parameters with equal settings are one group; names determine their rate and the step at which they are unfrozen."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.train.optim.optimizers import begin_step, build_optimizer, drop_not_yet_unfrozen
from finetune.train.optim.parameter_groups import (
    NamedParameter,
    describe_groups,
    layer_depths,
    layer_of,
    list_parameters,
    parameter_groups,
    rate_factors,
)

NAMES = ("embed_tokens.weight", "layers.0.q.weight", "layers.0.norm.weight", "layers.1.q.weight", "norm.weight", "head")


def named(*names: str) -> list[NamedParameter]:
    return [
        NamedParameter(name, (name,), nn.Parameter(torch.zeros(2) if "norm" in name else torch.zeros(2, 2)))
        for name in names
    ]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (0, 3)),
        ("base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight", (0, 3)),
        ("transformer.h.11.attn.c_attn.weight", (0, 11)),
        ("encoder.block.2.layer.0.SelfAttention.q.weight", (0, 2)),
        ("bert.encoder.layer.3.output.dense.bias", (0, 3)),
        ("resnet.encoder.stages.1.layers.0.layer.0.convolution.weight", (1, 0)),
        ("blocks.7.norm1.weight", (0, 7)),
        ("classifier.1.weight", None),
        ("model.embed_tokens.weight", None),
    ],
)
def test_the_layer_number_is_read_from_the_parameter_name(name, number):
    place = layer_of(name)
    assert (place.number if place else None) == number


def test_the_head_is_at_the_top_and_embeddings_below_the_longest_stack():
    names = [*(f"encoder.block.{i}.w" for i in range(3)), *(f"decoder.block.{i}.w" for i in range(2)), "shared.weight"]
    found = layer_depths({name: (name,) for name in [*names, "lm_head.weight", "encoder.final_layer_norm.weight"]})
    assert list(found.values()) == [3, 2, 1, 2, 1, 4, 0, 0]
    tied = layer_depths({"head.weight": ("head.weight", "embed_tokens.weight"), "layers.0.w": ("layers.0.w",)})
    assert tied == {"head.weight": 2, "layers.0.w": 1}


def test_layer_decay_multiplies_the_learning_rate_per_layer():
    factors = rate_factors(named(*NAMES), OptimizerSection(layer_decay=0.5))
    assert list(factors.values()) == [0.125, 0.25, 0.25, 0.5, 1.0, 1.0]


def test_factors_are_multiplied_and_the_first_pattern_that_fits_counts():
    section = OptimizerSection(layer_decay=0.5, rates={"layers.1.*": 0.1, "*lora*": 3.0}, lora_plus_ratio=16.0)
    names = ("layers.0.lora_A.default.weight", "layers.0.lora_B.default.weight", "layers.1.lora_B.default.weight")
    assert list(rate_factors(named(*names), section).values()) == [0.25 * 3, 0.25 * 3 * 16, 0.5 * 0.1 * 16]
    assert rate_factors(named("embed.lora_embedding_B.default"), OptimizerSection(lora_plus_ratio=4.0)) == {
        "embed.lora_embedding_B.default": 4.0
    }


def test_frozen_layers_count_as_layers():
    parameters = named(*NAMES)
    parameters[3].parameter.requires_grad_(False)
    factors = rate_factors(parameters, OptimizerSection(layer_decay=0.5))
    assert (factors["layers.0.q.weight"], "layers.1.q.weight" in factors) == (0.25, False)


def test_parameters_with_equal_settings_are_one_group():
    alike = parameter_groups(named(*NAMES), OptimizerSection())
    assert [len(group["params"]) for group in alike] == [6]
    section = OptimizerSection(weight_decay=0.1, rates={"layers.*": 0.5})
    groups = parameter_groups(named(*NAMES), section, [UnfreezeSection(patterns=("embed*",), after_steps=3)])
    told = [(g["weight_decay"], g["rate_factor"], g["begins_after"], len(g["params"])) for g in groups]
    assert told == [(0.1, 1.0, 3, 1), (0.1, 0.5, 0, 2), (0.0, 0.5, 0, 1), (0.0, 1.0, 0, 1), (0.1, 1.0, 0, 1)]


def test_a_partitioned_matrix_is_still_a_matrix():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = torch.Size((4, 4))  # as ZeRO-3 leaves it
    groups = parameter_groups([NamedParameter("weight", ("weight",), parameter)], OptimizerSection(weight_decay=0.1))
    assert groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("section", "unfreeze", "text"),
    [
        ({"rates": {"layer.*": 0.1}}, [], r"rates: no trained parameter matches `layer\.\*`.*`layers\.0\.q"),
        ({}, [("nothing", 2)], "unfreeze: no trained parameter matches `nothing`"),
        ({}, [("*", 2)], "nothing would be trained at the start"),
    ],
)
def test_a_pattern_without_a_match_is_rejected(section, unfreeze, text):
    begins = [UnfreezeSection(patterns=(pattern,), after_steps=steps) for pattern, steps in unfreeze]
    with pytest.raises(ModelError, match=text):
        parameter_groups(named(*NAMES), OptimizerSection(**section), begins)


def test_layer_decay_without_layers_is_refused():
    with pytest.raises(ModelError, match=r"no parameter name contains a layer number.*`conv\.weight`"):
        rate_factors(named("conv.weight"), OptimizerSection(layer_decay=0.9))


def test_parameter_groups_are_logged_if_they_differ():
    parameters = named(*NAMES)
    assert not list(describe_groups(parameter_groups(parameters, OptimizerSection()), parameters))
    unfreeze = [UnfreezeSection(patterns=("embed*",), after_steps=3)]
    lines = list(describe_groups(parameter_groups(parameters, OptimizerSection(), unfreeze), parameters))
    assert lines[1] == "  rate x 1        decay 0, from step 4: 4 parameters in 1 tensor, such as embed_tokens.weight"
    assert "excluded from the gradient norm" in lines[-1]


def test_parameter_groups_of_a_deep_model_are_logged_abbreviated():
    parameters = named(*(f"layers.{number}.q.weight" for number in range(20)))
    groups = parameter_groups(parameters, OptimizerSection(layer_decay=0.9))
    lines = list(describe_groups(groups, parameters))
    assert (len(groups), len(lines), lines[-1]) == (20, 14, "  and 8 more")


def test_a_group_trains_at_its_rate_factor_from_its_first_step():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = build_optimizer(
        list_parameters(net),
        OptimizerSection(rates={"0.*": 0.5}),
        learning_rate=0.1,
        unfreeze=[UnfreezeSection(patterns=("0.*",), after_steps=2)],
    )
    before = net[0].weight.clone()
    for step in range(2):
        begin_step(optimizer, step=step, learning_rate=0.1)
        assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(net[0].weight, before) and net[0].weight not in optimizer.state
    begin_step(optimizer, step=2, learning_rate=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    net(torch.ones(1, 2)).sum().backward()
    drop_not_yet_unfrozen(optimizer)
    optimizer.step()
    assert optimizer.state[net[0].weight]["step"] == 1 and not torch.equal(net[0].weight, before)
