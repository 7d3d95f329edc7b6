"""Small mixtures of experts with random weights."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_FINE = {**_SIZES, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "qk_nope_head_dim": 8,
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "head_dim": 8},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LOCAL = {**_SIZES, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}

SOFTMAX: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": {**_FINE, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_next": {**_FINE, **_LINEAR, "num_experts": 8},
    "qwen3_5_moe_text": {**_FINE, **_LINEAR, "num_experts": 8},
    "gpt_oss": {**_LOCAL, "head_dim": 8},
    "olmoe": {**_SIZES, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {**_LOCAL, **_MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
}
SIGMOID: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_FINE, **_GROUPED, **_LATENT},
    "glm4_moe": {**_FINE, **_GROUPED},
    "lfm2_moe": {**_FINE, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}
VOCABULARY = 64


def mixture(model_type: str, **values: Any) -> PreTrainedModel:
    """Return the model in training mode, its routers far enough from balance that experts differ."""
    known = {**SOFTMAX, **SIGMOID}.get(model_type, {})
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    config = AutoConfig.for_model(model_type, **{**known, **special, **values})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()
