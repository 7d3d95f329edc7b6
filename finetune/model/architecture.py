"""An architecture from `model.from_config`: the config object of transformers, with every value checked by name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.hub import told

KEY = "model.from_config"
OWN_KEYS = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.gradient_checkpointing",
}
ROPE_VALUES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Values that transformers folds into `rope_parameters`."""


@dataclass(frozen=True)
class SpecialIds:
    """The tokenizer's special tokens as numbers; None where it has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def architecture(
    section: FromConfigSection, *, vocabulary_size: int | None, special_ids: SpecialIds
) -> PreTrainedConfig:
    """Return the config of the model type with the values written; raises ModelError on any that it does not know.

    `vocab_size` is the tokenizer's unless written, and never smaller; special token ids are the tokenizer's.
    """
    if section.model_type not in CONFIG_MAPPING:
        near = _near(section.model_type, list(CONFIG_MAPPING.keys()))
        raise ModelError(f"{KEY}.model_type: transformers knows no `{section.model_type}`.{near}")
    _check_values(section)
    values = dict(section.values)
    if vocabulary_size is not None:
        values = {"vocab_size": vocabulary_size, **_token_values(special_ids), **values}
    if vocabulary_size is not None and (size := values["vocab_size"]) < vocabulary_size:
        raise ModelError(
            f"{KEY}.values.vocab_size: {size} is smaller than the tokenizer's {vocabulary_size} tokens. "
            "Leave it out, or write at least that many."
        )
    with told(section.model_type, key=KEY):
        return AutoConfig.for_model(section.model_type, **values)


def _check_values(section: FromConfigSection) -> None:
    known = _known_values(CONFIG_MAPPING[section.model_type])
    for name in section.values:
        if name in OWN_KEYS:
            raise ModelError(f"{KEY}.values.{name}: write `{OWN_KEYS[name]}` instead.")
        if name not in known:
            near = _near(name, sorted(known))
            raise ModelError(f"{KEY}.values.{name}: the config of `{section.model_type}` has no such value.{near}")


def _known_values(config_class: type[Any]) -> frozenset[str]:
    names: set[str] = set(getattr(config_class, "attribute_map", {}))
    for owner in (config_class, PreTrainedConfig):
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(owner.__init__).parameters
        names.update(name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD)
    return frozenset((names | ROPE_VALUES if "rope_parameters" in names else names) - {"self"})


def _token_values(special_ids: SpecialIds) -> dict[str, int | None]:
    return {"bos_token_id": special_ids.bos, "eos_token_id": special_ids.eos, "pad_token_id": special_ids.pad}


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""
