"""Every family of mixtures of experts, with two layers and four experts."""

from typing import Any

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TOP_2 = {"num_experts_per_tok": 2}
_LINEAR_ATTENTION = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_QWEN = {**_SIZES, **_TOP_2, "num_experts": 4, "moe_intermediate_size": 16, "intermediate_size": 64}
_DEEPSEEK = {**_SIZES, **_TOP_2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SPARSE = {"moe_intermediate_size": 16, "intermediate_size": 64, "first_k_dense_replace": 1}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LOCAL = {**_SIZES, **_TOP_2, "num_local_experts": 4}

MOE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _QWEN,
    "qwen3_5_moe_text": {
        **{name: _QWEN[name] for name in _QWEN if name != "intermediate_size"},
        **_LINEAR_ATTENTION,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_next": {**_QWEN, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16},
    "mixtral": {**_LOCAL, "intermediate_size": 48},
    "gpt_oss": {**_LOCAL, "intermediate_size": 48, "head_dim": 8},
    "deepseek_v3": {**_DEEPSEEK, **_LATENT, **_SPARSE, "num_key_value_heads": 4},
    "glm4_moe": {**_DEEPSEEK, **_SPARSE},
    "olmoe": {**_SIZES, **_TOP_2, "num_experts": 4, "intermediate_size": 16},
    "granitemoe": {**_LOCAL, "intermediate_size": 16},
    "lfm2_moe": {**_QWEN, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}
"""Values of the config by model type."""

HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **{**_LOCAL, **_MAMBA, "intermediate_size": 16, "shared_intermediate_size": 16},
        "layer_types": ["mamba", "attention"],
    },
    "falcon_h1": {**_SIZES, **_MAMBA, "intermediate_size": 64, "mamba_d_ssm": 64},
    "mamba2": {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8},
        **{"n_groups": 1, "expand": 2},
    },
}
"""Models with layers that a kernel computes as a whole."""
