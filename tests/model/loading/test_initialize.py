from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.model.loading.load import initialize_weights
from finetune.model.upstream import skip_weight_init
from finetune.runtime.parameters import InitContext


def test_weights_do_not_depend_on_torch_s_random_state(architecture_name, from_config, build):
    torch.manual_seed(1)
    first = build(from_config(architecture_name))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = build(from_config(architecture_name))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_another_seed_gives_other_weights_and_another_module_too(from_config, build):
    first, second = build(from_config(), seed=1), build(from_config(), seed=2)
    layers = first.model.layers
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)


def test_the_weights_of_a_layer_do_not_depend_on_the_depth_of_the_model(from_config, build):
    shallow, section = build(from_config()), from_config()
    values = {**section.from_config.values, "num_hidden_layers": 3}
    deep = build(section.model_copy(update={"from_config": section.from_config.model_copy(update={"values": values})}))
    assert len(deep.model.layers) == 3
    for name, weight in shallow.named_parameters():
        assert torch.equal(weight, deep.get_parameter(name)), name


def test_bfloat16_weights_are_the_rounded_float32_ones(architecture_name, from_config, build):
    exact, rounded = build(from_config(architecture_name)), build(from_config(architecture_name, dtype="bfloat16"))
    assert rounded.dtype == torch.bfloat16
    for name, weight in exact.named_parameters():
        assert torch.equal(weight.to(torch.bfloat16), rounded.get_parameter(name)), name


def test_weights_are_initialized_by_the_model_s_own_rules(from_config, build):
    llama, gpt2 = build(from_config("llama untied")), build(from_config("gpt2 tied"))
    assert (llama.model.norm.weight == 1).all()
    assert (llama.model.embed_tokens.weight[3] == 0).all()  # the padding token's row
    width = gpt2.transformer.h[0].attn.c_attn.weight.std()
    assert torch.isclose(gpt2.transformer.h[0].attn.c_proj.weight.std() * 2, width, rtol=0.1)  # 1 / sqrt(2 x 2 layers)


def test_parameters_that_are_empty_until_gathered_get_the_same_weights(architecture_name, from_config, build):
    """ZeRO-3's parameters are empty except within its gathering context."""
    expected, partitioned = build(from_config(architecture_name)), build(from_config(architecture_name), seed=1)
    parts = {parameter: parameter.data for parameter in partitioned.parameters()}
    for parameter in parts:
        parameter.data = torch.empty(0)
    num_gathered = []

    @contextmanager
    def gather(parameters):
        num_gathered.append(len(parameters))
        for parameter in parameters:
            parameter.data = parts[parameter]
        yield
        for parameter in parameters:
            assert parameter.data_ptr() == parts[parameter].data_ptr()
            parameter.data = torch.empty(0)

    initialize_weights(partitioned, seed=7, gather=InitContext(gather=gather).gather)
    for name, parameter in partitioned.named_parameters():
        assert torch.equal(parts[parameter], expected.get_parameter(name)), name
    assert max(num_gathered) < len(parts) / 2  # never the whole model at once


def test_a_matrix_for_which_the_model_has_no_rule_is_drawn_as_torch_does(monkeypatch):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    monkeypatch.setattr("transformers.LlamaModel._init_weights", lambda self, module: None)
    models = []
    for _ in range(2):
        with skip_weight_init():
            models.append(LlamaForCausalLM(config))
        initialize_weights(models[-1], seed=7, gather=InitContext().gather)
    one, other = (model.model.layers[0].mlp.up_proj.weight for model in models)
    assert one.isfinite().all()
    assert 0.05 < one.std() < 0.25  # uniform within 1 / sqrt(16)
    assert torch.equal(one, other)
