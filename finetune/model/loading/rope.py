"""Rotary position embeddings: a job's settings, merged into the config of pre-trained weights.

transformers keeps base, type and factor of the scaling in `rope_parameters`, in one mapping or in one per layer type;
`rope_scaling` and `rope_theta` are older names for parts of it. Rotary positions need more than the 10 bits of mantissa
that TF32 has.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.sections.model import RopeScalingSection
from finetune.errors import ModelError
from finetune.model.loading.config_names import ROPE_VALUES, known_names, sub_configs, suggestion

ROPE = "rope_parameters"
BY_LENGTH = ("dynamic", "longrope")
"""Scaling types whose frequencies depend on the longest sample of a forward pass."""


@dataclass(frozen=True)
class Positions:
    """The positions of a model according to its config."""

    number: int  # the number of positions that the model supports
    trained: int  # the number in pre-training, before scaling
    is_rotary: bool  # computed, and thus unlimited; otherwise they may be a table
    by_length: str | None = None  # the scaling type if its frequencies depend on the longest sample of a batch
    same_up_to: int = 0  # the length up to which these frequencies do not change


def positions_of(config: PreTrainedConfig) -> Positions | None:
    """Return the positions of the text model; None if its config has none."""
    text = config.get_text_config()
    number = getattr(text, "max_position_embeddings", None)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1 or getattr(text, "alibi", False) is True:
        return None
    parameters: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    scalings = nested or ([parameters] if parameters else [])  # one for all layers, or one per layer type
    trained = number
    for scaling in scalings:
        origin = scaling.get("original_max_position_embeddings")
        trained = min(trained, origin) if isinstance(origin, int) else trained
        if scaling.get("rope_type") in BY_LENGTH:
            short = origin if isinstance(origin, int) and scaling["rope_type"] == "longrope" else number
            return Positions(number, trained, True, str(scaling["rope_type"]), short)
        if isinstance(origin, int) and isinstance(scaling.get("factor"), int | float):
            number = max(number, int(origin * scaling["factor"]))
    return Positions(number, trained, bool(scalings))


def table_size(model: PreTrainedModel) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    sizes = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_position = ("position" in last and "relative" not in last) or last == "wpe"
        if isinstance(module, nn.Embedding) and is_position and not ("vision" in name or "visual" in name):
            first = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            sizes.append(module.num_embeddings - first)
    return min(sizes, default=None)


def keep_positions_exact(model: nn.Module) -> None:
    """Compute the angles of rotary positions without TF32, which represents few positions above 2,048 exactly.

    transformers computes them as a float32 matrix product of frequencies and positions, to which TF32 would apply.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            switch = _ExactProducts()
            module.register_forward_pre_hook(switch.enter)
            module.register_forward_hook(switch.leave, always_call=True)


class _ExactProducts:
    """Disables TF32 during a module's forward."""

    _previous = "highest"

    def enter(self, *_: Any) -> None:
        self._previous = torch.get_float32_matmul_precision()
        if self._previous != "highest":
            torch.set_float32_matmul_precision("highest")

    def leave(self, *_: Any) -> None:
        if self._previous != "highest":
            torch.set_float32_matmul_precision(self._previous)


ROPE_SCALING_KEY = "model.rope_scaling"

_ORIGIN = "original_max_position_embeddings"
_TYPES_WITH_ORIGIN = ("yarn", "llama3", "longrope")
"""Types of scaling that are relative to the length in pre-training."""

# fmt: off
_SCALING_VALUES = frozenset({
    "rope_type", "type", "factor", _ORIGIN, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
})
# fmt: on
"""The values that belong to a scaling; others (`rope_theta`, `mrope_section`, `llama_4_scaling_beta`) are kept."""

_PARTIAL = "proportional"
_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for rotary embeddings."""
    return {name: value for name, value in values.items() if name == ROPE or name in ROPE_VALUES}


def merged_rope(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return `rope_parameters` with a new scaling; other values are kept unless they are given."""
    old: dict[str, Any] = dict(getattr(config, ROPE, None) or {})
    nested = _by_layer(old)
    written = [name for name in ("rope_scaling", ROPE) if name in values]
    if len(written) > 1:
        raise ModelError(f"{key}.rope_scaling: `rope_parameters` sets the same. Keep only one of them.")
    given = values[written[0]] if written else None
    full_key = f"{key}.{written[0]}" if written and key != ROPE_SCALING_KEY else key
    if written and given is not None and not isinstance(given, Mapping):
        raise ModelError(
            f"{full_key}: must be a mapping such as `{{rope_type: yarn, factor: 4.0}}`, or `null` for none."
        )
    direct = {name: values[name] for name in ("rope_theta", "partial_rotary_factor") if name in values}
    if not nested:
        return _scaled(config, old, {**(given or {}), **direct}, replaces=bool(written), key=full_key)
    if direct or any(name not in nested for name in given or {}):
        raise ModelError(f"{full_key}: this model has one per layer type. Write {', '.join(nested)} in it.")
    for name, scaling in (given or {}).items():
        old[name] = _scaled(config, nested[name], scaling, replaces=True, key=full_key)
    return old


def _by_layer(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: inner for name, inner in parameters.items() if isinstance(inner, dict)}


def _scaled(
    config: PreTrainedConfig, old: Mapping[str, Any], given: Any, *, replaces: bool, key: str
) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ModelError(f"{key}: the value of a layer type is a mapping, `{{rope_type: yarn, factor: 4.0}}`.")
    if replaces and given and "rope_type" not in given and "type" not in given:
        raise ModelError(f"{key}: `rope_type` is missing. Write `rope_type: yarn` (or `linear`, `llama3`, ...) in it.")
    rope_type = given.get("rope_type", given.get("type", "default" if replaces else old.get("rope_type", "default")))
    dropped = {"attention_factor"} if rope_type == old.get("rope_type") and given else _SCALING_VALUES
    base = {name: old[name] for name in old if name not in dropped} if replaces else old
    new = {name: value for name, value in {**base, **given}.items() if name != "type"} | {"rope_type": rope_type}
    if rope_type not in (*ROPE_INIT_FUNCTIONS, "default", old.get("rope_type")):
        hint = suggestion(str(rope_type), sorted(ROPE_INIT_FUNCTIONS))
        raise ModelError(f"{key}: transformers has no `rope_type: {rope_type}`.{hint}")
    if old.get("rope_type") == _PARTIAL and rope_type != _PARTIAL:
        raise ModelError(
            f"{key}: `{config.model_type}` rotates only a part of each head (`rope_type: {_PARTIAL}`), for which "
            f"transformers has no `{rope_type}`. Write `{{rope_type: {_PARTIAL}, factor: ...}}` for that layer type "
            "in `model.config`."
        )
    if rope_type in _TYPES_WITH_ORIGIN:
        new.setdefault(_ORIGIN, _origin(config, old))
    return new


def _origin(config: PreTrainedConfig, old: Mapping[str, Any]) -> Any:
    """Return the number of positions in pre-training, None if the config does not contain it."""
    return old.get(_ORIGIN) or getattr(config, _ORIGIN, None) or getattr(config, "max_position_embeddings", None)


def require_as_written(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> None:
    """Raise ModelError if a value of the scaling in the built config differs from the one in the job."""
    for name in sub_configs(type(config)):
        part, inner = getattr(config, name, None), values.get(name)
        if isinstance(part, PreTrainedConfig) and isinstance(inner, Mapping):
            require_as_written(part, inner, key=f"{key}.{name}")
    built: dict[str, Any] = getattr(config, ROPE, None) or {}
    for name, value in rope_values(values).items():
        written = value if isinstance(value, Mapping) else {name: value}
        full_key = f"{key}.{name}" if key != ROPE_SCALING_KEY else key
        for layer_type, scaling in _by_layer(written).items() or [("", written)]:
            actual = built.get(layer_type, {}) if layer_type else built
            for part, expected in scaling.items():
                field = "rope_type" if part == "type" else part
                if expected is None or field not in _SCALING_VALUES or actual.get(field) == expected:
                    continue
                advice = f" Write it in `model.config.{field}`." if hasattr(config, field) else ""
                raise ModelError(
                    f"{full_key}: `{config.model_type}` would use `{field}: {actual.get(field)}` instead.{advice}"
                )


def rewritten_type(text: str, model_type: str, values: Mapping[str, Any]) -> str:
    """Return a sentence if transformers' error names another `rope_type` than the job.

    >>> rewritten_type("missing for 'rope_type'='longrope'", "phi3", {"rope_scaling": {"rope_type": "yarn"}})
    ' `phi3` treats `rope_type: yarn` as `longrope`.'
    """
    match = re.search(r"'rope_type'='(\w+)'", text)
    scaling = values.get("rope_scaling", values.get(ROPE))
    written = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if match is None or not isinstance(written, str) or written == match[1]:
        return ""
    return f" `{model_type}` treats `rope_type: {written}` as `{match[1]}`."


def rope_scaling_values(config: PreTrainedConfig, section: RopeScalingSection) -> dict[str, Any]:
    """Return the config values for `model.rope_scaling`: the scaling, and the resulting number of positions.

    In a model with full and sliding attention, only the layers with full attention are scaled. Raises ModelError.
    """
    text = config.get_text_config()
    if ROPE not in known_names(type(text)):
        raise ModelError(f"{ROPE_SCALING_KEY}: `{text.model_type}` has no rotary position embedding. Remove it.")
    old: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = _by_layer(old)
    if nested and not nested.keys() <= {_FULL_ATTENTION, _SLIDING_ATTENTION}:
        raise ModelError(
            f"{ROPE_SCALING_KEY}: `{text.model_type}` has one for each of {', '.join(nested)}. Write `rope_scaling` in "
            "`model.config` with the ones to change."
        )
    current = nested.get(_FULL_ATTENTION, {}) if nested else old
    current_positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(current_positions, int):
        raise ModelError(f"{ROPE_SCALING_KEY}: `{text.model_type}` has no `max_position_embeddings`. Remove it.")
    origin = section.original_max_position_embeddings or _origin(text, current)
    positions = int(origin * section.factor)
    if positions < current_positions:
        raise ModelError(
            f"{ROPE_SCALING_KEY}: {origin:,} positions x {section.factor:g} = {positions:,}, but the model already has "
            f"{current_positions:,}. Write a larger `factor`."
        )
    scaling: dict[str, Any] = {"rope_type": section.rope_type, "factor": section.factor}
    scaling |= {_ORIGIN: origin} if section.rope_type == "yarn" else {}
    values = {"rope_scaling": {_FULL_ATTENTION: scaling} if nested else scaling, "max_position_embeddings": positions}
    if text is config:
        return values
    for name in sub_configs(type(config)):
        if getattr(config, name, None) is text:
            return {name: values}
    raise ModelError(f"{ROPE_SCALING_KEY}: `{config.model_type}` is not supported. Write it in `model.config`.")


def rope_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that change rotary embeddings, including those in a text config."""
    inner = [name for value in values.values() if isinstance(value, Mapping) for name in rope_names(value)]
    return [name for name in values if name in ("rope_scaling", ROPE, "rope_theta")] or inner


def rotary_parameters(config: PreTrainedConfig) -> Any:
    """Return the config's values for rotary embeddings."""
    return getattr(config.get_text_config(), ROPE, None)


def is_remote_code(model: PreTrainedModel) -> bool:
    """Return whether the model's code came with its weights."""
    return not type(model).__module__.startswith("transformers.")


def uses_scaling(model: PreTrainedModel, unscaled: PreTrainedModel) -> bool:
    """Return whether the rotary embeddings of the models differ; both may be on the meta device."""
    if getattr(model.config, "alibi", False) is True:  # biases attention scores instead of rotating
        return False
    scaled = _frequencies(model)
    if scaled != _frequencies(unscaled):
        return True
    for values in scaled.values():
        rope_types = values.get("rope_type")
        used = rope_types.values() if isinstance(rope_types, dict) else [rope_types]
        if any(rope_type in BY_LENGTH for rope_type in used):
            return True
    return False


def _frequencies(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return frequencies, scale and type of each rotary embedding."""
    frequencies: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False) if "inv_freq" in buffer]
        config = getattr(module, "config", None)
        if not buffers or not isinstance(config, PreTrainedConfig):
            continue
        if "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        with torch.device("cpu"):
            real = type(module)(config=config)
        values = {buffer: getattr(real, buffer).tolist() for buffer in buffers}
        values |= {key: value for key, value in vars(real).items() if key.endswith("attention_scaling")}
        frequencies[name] = {**values, "rope_type": getattr(real, "rope_type", None)}
    return frequencies
