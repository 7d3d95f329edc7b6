"""Tiny random models of every kind that our attention is used with, and rows for them."""

import inspect

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from finetune.model.attention.implementation import register_per_sample
from finetune.runtime.packed_rows import SAMPLE_LENGTHS, SampleLengths

WINDOW, LENGTHS = 6, (11, 3, 17, 2, 1, 8)
"""Two of the samples are longer than the window."""

VALUES = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "query_pre_attn_scalar": 8},
    **{"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
}


def tiny_config(kind, **others):
    config_class = CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    known |= set(getattr(config_class, "__dataclass_fields__", ()))
    return AutoConfig.for_model(kind, **{**{key: value for key, value in VALUES.items() if key in known}, **others})


def tiny_model(kind, attention="per_sample", **others):
    register_per_sample()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **others), attn_implementation=attention).eval()
    assert model.config._attn_implementation == attention
    return model


def tokens(length, salt):
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(salt))


def row_of(samples):
    """Return what a model with our attention is given for these samples in one row."""
    lengths = [each.shape[1] for each in samples]
    return {
        "input_ids": torch.cat(samples, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool),
        SAMPLE_LENGTHS: SampleLengths(lengths),
        "use_cache": False,
    }
