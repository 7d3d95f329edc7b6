"""Samples laid end to end: each has the logits, the loss and the gradients that it has alone, or the model is refused.

For every attention implementation that runs on a CPU. Those of a GPU are proved at the start of each run.
"""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.model.attention.implementation import register_per_sample
from finetune.model.attention.isolation import check_isolation, require_position_ids
from finetune.task.lm_loss.token_loss import cross_entropy_sum
from finetune.task.model_inputs import collate_padded, collate_padding_free, forward_logits

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 24,
    "initializer_range": 0.3,
    **TOKENS,
}
MODELS = {
    "llama": SMALL,
    "qwen3": SMALL,
    "mistral": {**SMALL, "sliding_window": 6},
    "gemma2": {**SMALL, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SMALL, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt2": GPT2,
}
ON_CPU = [
    *((kind, "eager") for kind in MODELS),
    *((kind, "sdpa") for kind in MODELS if kind != "gemma2"),
    *((kind, "per_sample") for kind in MODELS),
]
"""Gemma 2 caps its attention scores, which sdpa cannot; gpt2 has no flex attention in transformers."""
LENGTHS = (11, 3, 17, 2, 1, 8)


def build(kind, attention):
    register_per_sample()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    assert model.config._attn_implementation == attention
    return model


def samples():
    draw = np.random.default_rng(0)
    return [
        Features(
            {"input_ids": draw.integers(0, 97, length).astype(np.uint32), "is_target": draw.random(length) < 0.7}, n
        )
        for n, length in enumerate(LENGTHS)
    ]


def per_token(model, batch):
    """Return the logits and the loss of every target in the order of the samples."""
    logits = forward_logits(model, batch)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    return logits, losses[batch.labels != -100]


def gradients(model, batches):
    model.zero_grad()
    sum(cross_entropy_sum(forward_logits(model, batch), batch.labels) for batch in batches).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@torch.no_grad()
def assert_each_is_as_alone(model, row, alone):
    logits, losses = per_token(model, row)
    of_each = [per_token(model, batch) for batch in alone]
    torch.testing.assert_close(logits[0], torch.cat([one[0] for one, _ in of_each]), rtol=0, atol=1e-5)
    torch.testing.assert_close(losses, torch.cat([loss for _, loss in of_each]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "attention"), ON_CPU)
def test_a_sample_in_a_row_is_the_sample_alone(kind, attention):
    model, row = build(kind, attention), collate_padding_free(samples())
    alone = [collate_padded([each], pad_id=0) for each in samples()]
    assert_each_is_as_alone(model, row, alone)
    together, apart = gradients(model, [row]), gradients(model, alone)
    assert ((together - apart).norm() / apart.norm()).item() < 1e-5


@pytest.mark.slow  # it is compiled first
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt2"])
def test_flex_attention_keeps_samples_apart(kind):
    """Its backward pass does not exist on a CPU; what each sample sees is the same there and back."""
    assert_each_is_as_alone(
        build(kind, "flex_attention"),
        collate_padding_free(samples()),
        [collate_padded([each], pad_id=0) for each in samples()],
    )


def prove(model):
    def of_row(row):
        each = [Features({"input_ids": np.array(ids), "is_target": np.ones(len(ids), bool)}) for ids in row]
        return forward_logits(model, collate_padding_free(each))[0]

    check_isolation(of_row, config=model.config, vocabulary_size=97, is_half=False)


@pytest.mark.parametrize(("kind", "attention"), ON_CPU)
def test_models_that_keep_samples_apart_are_let_through(kind, attention):
    prove(build(kind, attention))


def test_a_model_that_remembers_what_came_before_is_refused_by_name():
    torch.manual_seed(0)
    kinds = ["linear_attention", "full_attention"]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    values = {**SMALL, **linear, **heads, "num_hidden_layers": 2, "layer_types": kinds, "num_experts": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **values)).eval()
    with pytest.raises(ModelError) as refused:
        prove(model)
    said = str(refused.value)
    assert "`qwen3_next` (layers: full_attention, linear_attention) cannot keep samples in one row apart" in said
    assert "a sample changes when another in its row does" in said
    assert "write `by: tokens`" in said


def test_a_model_that_ignores_positions_is_refused():
    model = build("gpt2", "sdpa")
    given = model.forward

    def from_zero_to_end(position_ids, input_ids, **others):
        return given(input_ids=input_ids, position_ids=torch.arange(position_ids.shape[1])[None], **others)

    model.forward = from_zero_to_end
    with pytest.raises(ModelError, match="a sample changes when another in its row does"):
        prove(model)


def test_positions_that_do_not_begin_anew_are_found_where_nothing_is_seen():
    table = torch.randn(64, 97, generator=torch.Generator().manual_seed(0))

    def by_place_in_the_row(row):
        num_tokens = sum(len(ids) for ids in row)
        return table[:num_tokens]

    with pytest.raises(ModelError, match="its positions do not begin anew"):
        check_isolation(by_place_in_the_row, config=build("gpt2", "sdpa").config, vocabulary_size=97, is_half=False)


def test_a_model_without_positions_is_refused_before_any_forward_pass():
    with pytest.raises(ModelError, match="`gpt2` does not support packed samples: it has no `position_ids` argument"):
        require_position_ids(frozenset({"input_ids", "attention_mask"}), config=build("gpt2", "sdpa").config)
