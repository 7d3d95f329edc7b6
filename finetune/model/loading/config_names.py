"""The values that can be set in a model's config: those of its class, and a few that only the model's code reads."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

ROPE_VALUES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Values that transformers folds into `rope_parameters`."""
DECODER_START_TOKEN = "decoder_start_token_id"
"""The first token of a decoder; not every config of an encoder-decoder declares it."""

# fmt: off
UNDECLARED: Mapping[str, frozenset[str]] = {
    "head_dim": frozenset({
        "apertus", "apertus1p5_text", "bamba", "bitnet", "blt", "cohere", "dbrx", "doge", "dots1", "emu3",
        "ernie4_5_moe", "ernie4_5_vl_moe_text", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "glm4_moe",
        "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "gpt_neox", "gpt_neox_japanese", "granite",
        "granite4_vision_text", "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "jamba", "lfm2", "lfm2_moe", "modernbert-decoder", "nanochat",
        "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe",
        "qwen2", "qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text", "smollm3", "stablelm", "starcoder2",
    }),
    "classifier_dropout": frozenset({"biogpt", "bloom", "bros", "falcon", "gpt2", "gpt_bigcode", "mpt"}),
    "hidden_dropout": frozenset({"gpt2", "gpt_bigcode", "mpt"}),
    "sliding_window": frozenset({"olmoe"}),
}
# fmt: on
"""Values that models look up with `getattr(config, ...)` and their config classes do not declare, with the model types.

Checked against transformers 5.24; `tests/model/loading/test_config_names.py` fails when a decoder is missing.
"""


def known_names(config_class: type[Any]) -> frozenset[str]:
    """Return the names of all values that can be set in the config: the parameters of its class, and their aliases."""
    names: set[str] = set(getattr(config_class, "attribute_map", {}))
    for owner in (config_class, PreTrainedConfig):
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(owner.__init__).parameters
        names.update(name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD)
    names |= ROPE_VALUES if "rope_parameters" in names else frozenset()
    names |= {DECODER_START_TOKEN} if getattr(config_class, "is_encoder_decoder", False) is True else frozenset()
    model_type = getattr(config_class, "model_type", "")
    names.update(name for name, model_types in UNDECLARED.items() if model_type in model_types)
    return frozenset(names - {"self"})


def suggestion(name: str, names: list[str]) -> str:
    """Return a sentence with the most similar name; empty if none is similar."""
    matches = get_close_matches(name, names, n=1)
    return f" Did you mean `{matches[0]}`?" if matches else ""


def sub_configs(config_class: Any) -> Mapping[str, Any]:
    """Return the sub-configs by name, such as `text_config` and `vision_config`."""
    return getattr(config_class, "sub_configs", None) or {}


def sub_config_class(config_class: Any, name: str, written: Mapping[str, Any]) -> Any:
    """Return the class of a sub-config; None if it cannot be determined before loading."""
    if sub_configs(config_class)[name] is not AutoConfig:
        return sub_configs(config_class)[name]
    defaults = getattr(config_class, "sub_configs_defaults", {})
    model_type = written.get("model_type") or getattr(defaults.get(name), "model_type", None)
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  # `get` loads nothing
