"""The model types that are written as GGUF: what llama.cpp calls them, and how it computes what config.json says.

Each was compared with transformers through llama-cpp-python (`tests/export/gguf`). The keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import ModelError


@dataclass(frozen=True)
class GGUFArchitecture:
    """A model type: `name` is llama.cpp's, `keys` are from its metadata to the attributes of the config."""

    name: str
    permutes: bool = False  # its rotary embedding pairs neighbors, so rows of queries and keys are reordered
    norm_offset: float = 0.0  # added to the weights of norms
    sliding_every: int = 0  # of this number of layers, the last one attends to everything; 0: all
    keys: Mapping[str, str] | None = None


_GEMMA = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", permutes=True),
    "mistral": GGUFArchitecture("llama", permutes=True),
    "mixtral": GGUFArchitecture("llama", permutes=True, keys={**_EXPERTS, "expert_count": "num_local_experts"}),
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3_moe": GGUFArchitecture("qwen3moe", keys={**_EXPERTS, **_WIDTH}),
    "olmo2": GGUFArchitecture("olmo2"),
    "gemma": GGUFArchitecture("gemma", norm_offset=1.0),
    "gemma2": GGUFArchitecture("gemma2", norm_offset=1.0, sliding_every=2, keys=_GEMMA),
    "gemma3_text": GGUFArchitecture("gemma3", norm_offset=1.0, sliding_every=6, keys=_GEMMA),
    "phi3": GGUFArchitecture("phi3"),
    "granite": GGUFArchitecture("granite", permutes=True, keys=_GRANITE),
}


def find_architecture(config: Any) -> GGUFArchitecture:
    """Return the architecture of the model; raises ModelError if it is not known, or computes otherwise than there."""
    architecture = ARCHITECTURES.get(config.model_type)
    problem = f"`{config.model_type}` models are not among those that it writes" if architecture is None else None
    if architecture is not None:
        problem = next(_differences(architecture, config), None)
    if problem is not None or architecture is None:
        raise ModelError(
            f"GGUF: {problem}. Use llama.cpp's own converter, in an environment of its own:\n"
            "  git clone https://github.com/ggml-org/llama.cpp && pip install -r llama.cpp/requirements.txt\n"
            f"  python llama.cpp/convert_hf_to_gguf.py {config.name_or_path} --outtype bf16"
        )
    return architecture


def metadata(architecture: GGUFArchitecture, config: Any) -> dict[str, int | float | str]:
    """Return the values of the file's keys, without the name of the architecture in front."""
    head_dim = _head_dim(config)
    values: dict[str, int | float | str | None] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * _rope(config).get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(_rope(config)["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    values |= {key: getattr(config, name) for key, name in (architecture.keys or {}).items()}
    if "sliding_attention" in (config.rope_parameters or {}):
        values["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if _rope(config)["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = _rope(config)["rope_type"]
        values["rope.scaling.factor"] = float(_rope(config)["factor"])
    if _rope(config)["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = _rope(config)["original_max_position_embeddings"]
    return {key: value for key, value in values.items() if value is not None}


def rope_divisors(config: Any) -> list[float] | None:
    """Return the divisors of the rotary frequencies of Llama 3.1; None for other models."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    dimension = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for index in range(0, dimension, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (index / dimension)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (smooth + (1 - smooth) / rope["factor"]))
    return divisors


def _differences(architecture: GGUFArchitecture, config: Any) -> Iterator[str]:
    """Yield what llama.cpp computes otherwise; it takes these values from the architecture, not from the file."""
    rope, layers = _rope(config), config.num_hidden_layers
    if rope["rope_type"] not in ("default", "linear", "yarn", "llama3"):
        yield f"positions are scaled by `{rope['rope_type']}`"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar not in (None, _head_dim(config)) and layers not in (46, 62):  # those of the 27B models
        yield f"`query_pre_attn_scalar` is {scalar} instead of the head dimension, {_head_dim(config)}"
    period = architecture.sliding_every
    expected = ["full_attention" if not period or (n + 1) % period == 0 else "sliding_attention" for n in range(layers)]
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if list(types) != expected and (window or 0) < config.max_position_embeddings:
        yield f"its layers have a sliding window of {window} otherwise than llama.cpp's `{architecture.name}`"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is bidirectional"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    return {"rope_type": "default", **parameters.get("full_attention", parameters)}
