"""Model types that support packed rows with our attention, and why others do not; whether a model reads its padding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from finetune.errors import ModelError
from finetune.model.attention.upstream import modeling_file

# fmt: off
PLAIN_MODEL_TYPES = frozenset({
    "afmoe", "apertus", "aria_text", "arcee", "axk1", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "llama", "mellum",
    "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
})
# fmt: on
"""Values of `model_type` whose attention gets the lengths and the window; nothing else mixes tokens."""

SINK_MODEL_TYPES = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa"})
"""Those with attention sinks, which torch's kernels do not know."""

# fmt: off
PACKED_FROM_THE_FIRST = frozenset({
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral",
    "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "starcoder2",
})
# fmt: on
"""Types that every version packs. Checkpoints of others say so where their run did: older versions padded them."""

_CONVOLUTION, _DELTA_RULE = ("causal_conv1d_fn",), ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_DELTA_ATTENTION = ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA_2 = ("causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan")
HYBRID_MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTION),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA_RULE),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _DELTA_ATTENTION),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), _MAMBA_2),
}
"""Those with layers that carry a state along the row, and transformers' functions that need the lengths."""

OWN_ATTENTION_TYPES = SINK_MODEL_TYPES | {"llama4_text"} | frozenset(HYBRID_MODEL_TYPES)
PACKING_MODEL_TYPES = PLAIN_MODEL_TYPES | OWN_ATTENTION_TYPES

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LAYER_TYPES_OF: Mapping[str, frozenset[str]] = {
    "llama4_text": frozenset({"full_attention", "chunked_attention"}),
    "qwen2_moe": frozenset({"full_attention"}),  # transformers 5.23 does not pass the window to its attention
    **dict.fromkeys(
        HYBRID_MODEL_TYPES,
        frozenset({"full_attention", "linear_attention", "conv", "hybrid", "attention", "mamba", "mlp", "moe"}),
    ),
}

_SCAN = "its scan (Mamba 1) does not get the boundaries of samples"
_STATE = "its layers carry a state along the row in one piece of code, which does not get the boundaries of samples"
_ATTENTION = "its attention does not get the boundaries of samples"
_INDEXER = "its sparse attention picks keys from the whole row"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba", "zamba"), _SCAN),
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(
        ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "nemotron", "phimoe", "stablelm"), _ATTENTION
    ),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2", "minimax_m3_vl_text"), _INDEXER),
}


# fmt: off
PACKING_ENCODER_TYPES = frozenset({
    "albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "gte",
    "jina_embeddings_v3", "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "ultrabert", "xlm-roberta",
    "xlm-roberta-xl",
})
# fmt: on
"""Values of `model_type`. Others compute attention in code of their own, or from relative positions of a whole row."""


def has_sinks(config: Any) -> bool:
    """Return whether layers of this model have attention sinks."""
    return text_config(config).model_type in SINK_MODEL_TYPES


def needs_flash_attention(config: Any) -> str:
    """Return what the attention of this model has that torch's varlen kernel lacks; empty for nothing."""
    text = text_config(config)
    if getattr(text, "attn_logit_softcapping", None):
        return "soft caps"
    return "dropout" if getattr(text, "attention_dropout", 0.0) else ""


def carries_state(config: Any) -> bool:
    """Return whether layers of this model carry a state along the row."""
    return text_config(config).model_type in HYBRID_MODEL_TYPES


def padding_reason(config: Any) -> str | None:
    """Return why samples must be padded; None if they can be packed into one row without padding."""
    is_encoder = (
        config.model_type in PACKING_ENCODER_TYPES
        and type(config).__module__.startswith("transformers.models.")
        and SUPPORTED_LAYER_TYPES.issuperset(getattr(config, "layer_types", None) or ())
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
    )
    if is_encoder:
        return None
    config = text_config(config)
    model_type = config.model_type
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not type(config).__module__.startswith("transformers.models."):
        return f"`{model_type}` brings its own code"
    if model_type not in PACKING_MODEL_TYPES and "vision_config" in (getattr(config, "sub_configs", None) or ()):
        return f"`{model_type}` is built with its image part, which is not known to keep packed samples apart"
    if model_type not in PACKING_MODEL_TYPES:
        return f"`{model_type}`: {_REASONS.get(model_type, 'it is not known to keep packed samples apart')}"
    unknown = layer_types - LAYER_TYPES_OF.get(model_type, SUPPORTED_LAYER_TYPES)
    if unknown:
        return f"`{model_type}` has layers of another kind: {', '.join(sorted(unknown))}"
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    is_causal = getattr(config, "is_causal", True) is not False and not is_bidirectional
    if getattr(config, "add_cross_attention", False) or not is_causal:
        return f"`{model_type}` is not a causal decoder here"
    if getattr(config, "output_router_logits", False):
        return f"`{model_type}`: its `output_router_logits` reads the padding mask"
    missing = [name for name in HYBRID_MODEL_TYPES.get(model_type, ()) if not hasattr(modeling_file(config), name)]
    return f"`{model_type}`: this transformers has no `{missing[0]}`" if missing else None


def text_config(config: Any) -> Any:
    """Return the config of the model that is built as a causal decoder: a model of images may give its text part."""
    part = (getattr(config, "sub_configs", None) or {}).get("text_config")
    if part is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    return config.get_text_config() if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is part else config


_TEXT = "The quick brown fox jumps over the lazy dog, and 1,024 others watch it in the rain. "
_WORDS, _LONGEST = 12, 300  # of the shorter sample, and tokens of the longer one
_TOLERANCE = {"full": 1e-4, "half": 0.1}
_JITTER = ("router_jitter_noise", "input_jitter_noise")
_RANDOM = {"yoso": "its attention hashes at random"}


@torch.no_grad()
def check_padding(
    outputs_of: Callable[[Sequence[Sequence[int]]], Tensor],
    *,
    config: Any,
    tokenizer: Any,
    longest: int,
    is_half: bool,
    advice: str,
) -> None:
    """Raise ModelError, with the advice, where a sample has other outputs in a padded batch than alone.

    `outputs_of` returns the model's outputs for samples, padded on the right, in evaluation mode: [samples, outputs] or
    [samples, tokens, outputs]. `longest` is the maximum number of tokens that it reads. Collective if `outputs_of` is.
    """
    limit = min(longest, _LONGEST)
    texts = (" ".join(_TEXT.split()[:_WORDS]), _TEXT * _LONGEST)
    short, long = (tokenizer(text)["input_ids"] for text in texts)
    long = [*long[: limit - 1], long[-1]]
    length = min(len(short), len(long) // 2)
    short = [*short[: length - 1 - (length % 2 == 0)], short[-1]]  # of odd length: pooled pairs have a neighbor
    alone = outputs_of([short])[0]
    padded = outputs_of([short, long])[0]
    if alone.dim() == 2:
        length = min(len(short), len(alone))
        alone, padded = alone[:length], padded[:length]
    difference = (alone.float() - padded.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6)
    if float(difference) > _TOLERANCE["half" if is_half else "full"] and config.model_type not in _RANDOM:
        raise ModelError(
            f"`{config.model_type}` reads its padding: its outputs for a sample depend on the longer ones in its "
            f"batch (here by {float(difference):.2g} of the largest output). {advice}"
        )


def randomness(config: Any) -> str | None:
    """Return how the layers of this model draw random numbers besides dropout; None if they draw none."""
    jitter = (f"`{name}: {getattr(config, name)}` in its config" for name in _JITTER if getattr(config, name, None))
    reason = _RANDOM.get(config.model_type) or next(jitter, None)
    return reason and (
        f"`{config.model_type}` draws random numbers besides dropout ({reason}): its losses depend, by chance, on the "
        "microbatch size and the number of processes"
    )
