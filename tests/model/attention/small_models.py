"""Tiny random models of every type that uses our attention, and packed rows for them."""

import inspect

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from finetune.model.attention.implementation import register_per_sample
from finetune.model.attention.upstream import patch_row_functions
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths

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

DELTA_RULE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
STATE_SPACE = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_conv": 4},
    **{"mamba_n_groups": 1, "mamba_chunk_size": 16},
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
SHARED_KEYS = {"num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2, "num_kv_shared_layers": 2}
PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GLOBAL_HEADS = {"global_head_dim": 16, "num_global_key_value_heads": 2}

VALUES_OF = {
    **dict.fromkeys(("afmoe", "cohere2_moe", "cwm", "exaone_moe", "gpt_oss", "granite_swa", "mellum"), WINDOWS),
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("granitemoe_swa", "modernbert-decoder", "vaultgemma"), WINDOWS),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_next"), DELTA_RULE),
    "dots1": ROUTED | {"n_shared_experts": 1},
    "glm4_moe": ROUTED,
    "bamba": STATE_SPACE | {"attn_layer_indices": [1]},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "falcon_h1": STATE_SPACE | {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **SHARED_KEYS,
        **PER_LAYER,
        **{"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    },
    "gemma4_text": SHARED_KEYS | PER_LAYER | GLOBAL_HEADS,
    "gemma4_unified_text": GLOBAL_HEADS | WINDOWS,
    "granitemoehybrid": STATE_SPACE | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "kimi_linear": {
        **LATENT,
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 8},
    },
    "lfm2": CONVOLUTIONS | {"block_multiple_of": 16},
    "lfm2_moe": CONVOLUTIONS | {"num_dense_layers": 1},
    "lfm3": CONVOLUTIONS,
    "llama4_text": {
        **{"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]},
        **{"no_rope_layers": [1, 0], "floor_scale": 4},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "num_hidden_layers": 4},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
        **{"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    },
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "qwen2_moe": {"shared_expert_intermediate_size": 16, "use_sliding_window": False},
    "qwen3_5_moe_text": DELTA_RULE | {"shared_expert_intermediate_size": 16},
    "zamba2": STATE_SPACE | {"mamba_ngroups": 1, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
}
"""What some kinds need beside `VALUES`, so that every kind of layer they have is in them."""


def small_values(kind):
    """Return the values of the model type's config, by name."""
    config_class = CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    known |= set(getattr(config_class, "__dataclass_fields__", ()))
    return {**{key: value for key, value in VALUES.items() if key in known}, **VALUES_OF.get(kind, {})}


def tiny_config(kind, **others):
    return AutoConfig.for_model(kind, **{**small_values(kind), **others})


def tiny_model(kind, attention="per_sample", **others):
    config = tiny_config(kind, **others)
    register_per_sample()
    patch_row_functions(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    assert model.config._attn_implementation == attention
    return model


def tokens(length, salt):
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(salt))


def row_of(samples):
    """Return the inputs of a model with our attention for these samples in one row."""
    lengths = [sample.shape[1] for sample in samples]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        **{"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": max(lengths), "max_length_k": max(lengths)},
        "input_ids": torch.cat(samples, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool),
        SAMPLE_LENGTHS: SampleLengths(lengths),
        "use_cache": False,
    }
