"""Models that are known to keep the samples of a row apart with our attention: each is proved in the tests."""

from typing import Any

KEEPING_APART = frozenset(
    {
        *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2"),
        *("gpt_bigcode", "gpt_neox", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral"),
        *("olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        "starcoder2",
    }
)
"""Values of `model_type`. Left out is what hands its attention no lengths or no window, or mixes tokens otherwise."""

LAYERS = frozenset({"full_attention", "sliding_attention"})


def keeps_samples_apart(config: Any) -> bool:
    """Tell whether a model of that config is one of them: its code transformers' own, its layers attention alone."""
    return (
        config.model_type in KEEPING_APART
        and type(config).__module__.startswith("transformers.models.")
        and LAYERS.issuperset(getattr(config, "layer_types", None) or ())
        and not getattr(config, "add_cross_attention", False)
        and not getattr(config, "output_router_logits", False)  # their loss reads a mask of the padding
        and getattr(config, "is_causal", True) is not False
    )
