"""Parameters with equal settings are one group; names determine their rate and the step at which they are unfrozen."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from finetune.config.sections.model import LoraSection, PeftSection
from finetune.config.sections.train import OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.train.optim.optimizers import begin_step, build_optimizer, drop_not_yet_unfrozen
from finetune.train.optim.parameter_groups import (
    NamedParameter,
    describe_groups,
    group_settings,
    layer_depths,
    layer_of,
    list_parameters,
    parameter_groups,
    rate_factors,
)
from tests.refusals import refused

NAMES = ("embed_tokens.weight", "layers.0.q.weight", "layers.0.norm.weight", "layers.1.q.weight", "norm.weight", "head")


def named(*names: str) -> list[NamedParameter]:
    return [NamedParameter(name, (name,), nn.Parameter(torch.zeros(2, 2)), is_vector="norm" in name) for name in names]


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
    model = nn.Linear(4, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_shape = torch.Size((4, 4))  # as ZeRO-3 leaves it
    groups = parameter_groups(list_parameters(model), OptimizerSection(weight_decay=0.1))
    assert groups[0]["weight_decay"] == 0.1


TINY_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {  # a model with the parts of its type, and its trained parameters of two and more dimensions without decay
    "llama": (AutoModelForCausalLM, {**TINY_SIZES, "attention_bias": True}, set()),
    "gpt2": (AutoModelForCausalLM, {"n_embd": 16, "n_layer": 1, "n_head": 2}, set()),
    "bert": (AutoModelForMaskedLM, TINY_SIZES, set()),
    "qwen3_moe": (AutoModelForCausalLM, {**TINY_SIZES, "num_experts": 3, "moe_intermediate_size": 8}, set()),
    "gpt_oss": (
        AutoModelForCausalLM,
        {**TINY_SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "num_key_value_heads": 2},
        {"experts.gate_up_proj_bias", "experts.down_proj_bias"},
    ),
    "mamba": (AutoModelForCausalLM, {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, {"mixer.A_log"}),
    "rwkv": (
        AutoModelForCausalLM,
        {"hidden_size": 16, "num_hidden_layers": 2},
        {f"{part}.time_mix_{name}" for part in ("attention", "feed_forward") for name in ("key", "value", "receptance")}
        - {"feed_forward.time_mix_value"},
    ),
    "cohere": (AutoModelForCausalLM, {**TINY_SIZES, "use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        {"relative_attention_bias.weight"},
    ),
    "xlnet": (
        AutoModelForCausalLM,
        {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32},
        {"transformer.mask_emb", "rel_attn.r_r_bias", "rel_attn.r_s_bias", "rel_attn.r_w_bias"},
    ),
    "vit": (AutoModelForImageClassification, {**TINY_SIZES, "image_size": 32, "num_labels": 1}, {"cls_token"}),
    "swin": (
        AutoModelForImageClassification,
        {"embed_dim": 8, "depths": [1], "num_heads": [2], "image_size": 32},
        {"relative_position_bias_table"},
    ),
    "convnextv2": (
        AutoModelForImageClassification,
        {"hidden_sizes": [8], "depths": [1], "num_stages": 1},
        {"grn.weight", "grn.bias"},
    ),
}


def decayed(model: nn.Module) -> dict[str, bool]:
    """Return which trained parameters one step of AdamW without gradients multiplies by 1 - 0.1 x 0.5."""
    named = [entry for entry in list_parameters(model) if entry.parameter.requires_grad]
    before = {}
    for entry in named:
        entry.parameter.data.fill_(1.0)
        entry.parameter.grad = torch.zeros_like(entry.parameter)
        before[entry.name] = entry.parameter
    build_optimizer(named, OptimizerSection(weight_decay=0.5), learning_rate=0.1).step()
    values = {name: set(parameter.detach().flatten().tolist()) for name, parameter in before.items()}
    assert all(len(alike) == 1 for alike in values.values())
    return {name: alike.pop() == pytest.approx(0.95) for name, alike in values.items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_weight_decay_reaches_the_matrices_of_every_type_of_model_and_no_vector(model_type):
    auto_class, values, vectors = MODELS[model_type]
    sizes = {} if auto_class is AutoModelForImageClassification else {"vocab_size": 32, "pad_token_id": 0}
    model = auto_class.from_config(AutoConfig.for_model(model_type, **values, **sizes))
    found = decayed(model)
    assert not any(found[name] for name, parameter in model.named_parameters() if parameter.dim() < 2)
    spared = {name for name, parameter in model.named_parameters() if parameter.dim() >= 2 and not found[name]}
    assert {next((end for end in vectors if name.endswith(end)), name) for name in spared} == vectors
    assert any(found.values())


LINEAR = ("q_proj",)
ADAPTERS = {  # the trained parameters of a layer's adapter by the end of their names: whether they are decayed
    "ia3": (PeftSection(type="ia3", values={"target_modules": list(LINEAR)}), {"ia3_l.default": False}),
    "lora of rank 1": (
        LoraSection(rank=1, target_modules=("q_proj", "embed_tokens")),
        dict.fromkeys(
            ("lora_A.default.weight", "lora_B.default.weight", "lora_embedding_A.default", "lora_embedding_B.default"),
            True,
        ),
    ),
    "dora": (
        LoraSection(rank=2, dora=True, target_modules=LINEAR),
        {
            "lora_A.default.weight": True,
            "lora_B.default.weight": True,
            "lora_magnitude_vector.default.weight": False,
        },
    ),
    "boft": (
        PeftSection(type="boft", values={"boft_block_size": 4, "target_modules": ["q_proj"]}),
        {"boft_R.default": True, "boft_s.default": False},
    ),
    "loha": (
        PeftSection(type="loha", values={"r": 1, "target_modules": ["q_proj"]}),
        dict.fromkeys(("hada_w1_a.default", "hada_w1_b.default", "hada_w2_a.default", "hada_w2_b.default"), True),
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_weight_decay_reaches_the_factors_of_adapters_and_no_scale(kind):
    section, expected = ADAPTERS[kind]
    config = AutoConfig.for_model("qwen3", **TINY_SIZES, vocab_size=32, head_dim=8, tie_word_embeddings=False)
    model = add_adapter(AutoModelForCausalLM.from_config(config), section, AdapterContext(seed=1))
    found = decayed(model)
    assert {next(end for end in expected if name.endswith(end)): is_decayed for name, is_decayed in found.items()} == (
        expected
    )


@pytest.mark.parametrize(
    ("section", "unfreeze", "fact"),
    [({"rates": {"layer.*": 0.1}}, [], "`layer.*`"), ({}, [("nothing", 2)], "`nothing`"), ({}, [("*", 2)], "unfreeze")],
)
def test_a_pattern_without_a_match_is_rejected(section, unfreeze, fact):
    begins = [UnfreezeSection(patterns=(pattern,), after_steps=steps) for pattern, steps in unfreeze]
    with refused(ModelError, "train.", fact):
        parameter_groups(named(*NAMES), OptimizerSection(**section), begins)


def test_layer_decay_without_layers_is_refused():
    with refused(ModelError, "`conv.weight`"):
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


def test_settings_are_recorded_by_name_without_the_numbers_of_layers():
    entries = named(*NAMES)
    groups = parameter_groups(entries, OptimizerSection(weight_decay=0.1, rates={"layers.1.*": 0.5}))
    recorded = group_settings(groups, entries)
    assert list(recorded) == ["embed_tokens.weight", "layers.*.q.weight", "head", "layers.*.norm.weight", "norm.weight"]
    assert recorded["layers.*.norm.weight"] == "1 with weight_decay 0.0, rate_factor 1.0, begins_after 0"
    assert recorded["layers.*.q.weight"].count("1 with weight_decay 0.1, rate_factor") == 2


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
