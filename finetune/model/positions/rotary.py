"""Whether a model's code uses the scaling of rotary embeddings that its config has."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.model.positions.limits import BY_LENGTH, ROPE


def rope_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of those values that scale rotary embeddings, in a text config, too."""
    inner = [name for each in values.values() if isinstance(each, Mapping) for name in rope_names(each)]
    return [name for name in values if name in ("rope_scaling", ROPE, "rope_theta")] or inner


def rotary_parameters(config: PreTrainedConfig) -> Any:
    """Return what the config says of rotary embeddings."""
    return getattr(config.get_text_config(), ROPE, None)


def is_remote_code(model: PreTrainedModel) -> bool:
    """Tell whether the model's code came with its weights."""
    return not type(model).__module__.startswith("transformers.")


def uses_scaling(model: PreTrainedModel, usual: PreTrainedModel) -> bool:
    """Tell whether the rotary embeddings of the model are others than those of the usual one; both may be on meta."""
    if getattr(model.config, "alibi", False) is True:  # which adds to the scores of attention, and rotates nothing
        return False
    scaled = _frequencies(model)
    return scaled != _frequencies(usual) or any(each.get("rope_type") in BY_LENGTH for each in _read(scaled))


def _read(frequencies: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for each in frequencies.values():
        kinds = each.get("rope_type")
        yield from ({"rope_type": kind} for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _frequencies(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return what each rotary embedding computes with: its frequencies, their scale and their kind."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        buffers = [each for each, _ in module.named_buffers(recurse=False) if "inv_freq" in each]
        config = getattr(module, "config", None)
        if not buffers or not isinstance(config, PreTrainedConfig):
            continue
        if "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        with torch.device("cpu"):
            real = type(module)(config=config)
        scales = {each: value for each, value in vars(real).items() if each.endswith("attention_scaling")}
        values = {each: getattr(real, each).tolist() for each in buffers}
        found[name] = {**values, **scales, "rope_type": getattr(real, "rope_type", None)}
    return found
