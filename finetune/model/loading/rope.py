"""Rotary position embeddings: what a job writes about them, merged into the config of pre-trained weights.

transformers keeps base, kind and factor of the scaling in `rope_parameters`, in one mapping or in one for each kind of
layer; `rope_scaling` and `rope_theta` are its older names for parts of it.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.sections.model import RopeScalingSection
from finetune.errors import ModelError
from finetune.model.loading.config_names import ROPE_VALUES, known_names, sub_configs, suggestion
from finetune.model.positions import BY_LENGTH, ROPE

ROPE_SCALING_KEY = "model.rope_scaling"

_ORIGIN = "original_max_position_embeddings"
_TYPES_WITH_ORIGIN = ("yarn", "llama3", "longrope")
"""Kinds of scaling that count from the length of pre-training."""

_SCALING_VALUES = frozenset(
    {"rope_type", "type", "factor", _ORIGIN, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
)
"""What other scaling replaces; the rest (`rope_theta`, `mrope_section`, `llama_4_scaling_beta`) is of the model."""

_PARTIAL = "proportional"
_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values that are about rotary embeddings."""
    return {name: value for name, value in values.items() if name == ROPE or name in ROPE_VALUES}


def merged_rope(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return `rope_parameters` with other scaling: what is no part of the scaling stays unless written."""
    old: dict[str, Any] = dict(getattr(config, ROPE, None) or {})
    nested = _by_layer(old)
    written = [name for name in ("rope_scaling", ROPE) if name in values]
    if len(written) > 1:
        raise ModelError(f"{key}.rope_scaling: `rope_parameters` is the same. Keep only one of them.")
    given = values[written[0]] if written else None
    place = f"{key}.{written[0]}" if written and key != ROPE_SCALING_KEY else key
    if written and given is not None and not isinstance(given, Mapping):
        raise ModelError(f"{place}: must be a mapping such as `{{rope_type: yarn, factor: 4.0}}`, or `null` for none.")
    direct = {name: values[name] for name in ("rope_theta", "partial_rotary_factor") if name in values}
    if not nested:
        return _scaled(config, old, {**(given or {}), **direct}, replaces=bool(written), key=place)
    if direct or any(name not in nested for name in given or {}):
        raise ModelError(f"{place}: this model has one for each kind of layer. Write {', '.join(nested)} in it.")
    changed = {
        name: _scaled(config, nested[name], each, replaces=True, key=place) for name, each in (given or {}).items()
    }
    return {**old, **changed}


def _by_layer(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in parameters.items() if isinstance(each, dict)}


def _scaled(
    config: PreTrainedConfig, old: Mapping[str, Any], given: Any, *, replaces: bool, key: str
) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ModelError(f"{key}: the value of a kind of layer is a mapping, `{{rope_type: yarn, factor: 4.0}}`.")
    if replaces and given and "rope_type" not in given and "type" not in given:
        raise ModelError(f"{key}: `rope_type` is missing. Write `rope_type: yarn` (or `linear`, `llama3`, ...) in it.")
    kind = given.get("rope_type", given.get("type", "default" if replaces else old.get("rope_type", "default")))
    dropped = {"attention_factor"} if kind == old.get("rope_type") and given else _SCALING_VALUES
    base = {name: old[name] for name in old if name not in dropped} if replaces else old
    new = {name: value for name, value in {**base, **given}.items() if name != "type"} | {"rope_type": kind}
    if kind not in (*ROPE_INIT_FUNCTIONS, "default", old.get("rope_type")):
        hint = suggestion(str(kind), sorted(ROPE_INIT_FUNCTIONS))
        raise ModelError(f"{key}: transformers has no `rope_type: {kind}`.{hint}")
    if old.get("rope_type") == _PARTIAL and kind != _PARTIAL:
        raise ModelError(
            f"{key}: `{config.model_type}` rotates a part of each head (`rope_type: {_PARTIAL}`), for which "
            f"transformers has no `{kind}`. Write `{{rope_type: {_PARTIAL}, factor: ...}}` for that kind of layer in "
            "`model.config`."
        )
    if kind in _TYPES_WITH_ORIGIN:
        new.setdefault(_ORIGIN, _origin(config, old))
    return new


def _origin(config: PreTrainedConfig, old: Mapping[str, Any]) -> Any:
    """Return the number of positions of pre-training, as far as the config tells; None where it does not."""
    return old.get(_ORIGIN) or getattr(config, _ORIGIN, None) or getattr(config, "max_position_embeddings", None)


def require_as_written(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> None:
    """Raise ModelError where the built config has another value than the one that was written into its scaling."""
    for name in sub_configs(type(config)):
        part, inner = getattr(config, name, None), values.get(name)
        if isinstance(part, PreTrainedConfig) and isinstance(inner, Mapping):
            require_as_written(part, inner, key=f"{key}.{name}")
    built: dict[str, Any] = getattr(config, ROPE, None) or {}
    for place, each in rope_values(values).items():
        written = each if isinstance(each, Mapping) else {place: each}
        for layer, inner in _by_layer(written).items() or [("", written)]:
            has = built.get(layer, {}) if layer else built
            _require_same(config, inner, has, key=f"{key}.{place}" if key != ROPE_SCALING_KEY else key)


def _require_same(config: PreTrainedConfig, written: Mapping[str, Any], built: Mapping[str, Any], *, key: str) -> None:
    for name, value in written.items():
        own = "rope_type" if name == "type" else name
        if value is not None and own in _SCALING_VALUES and built.get(own) != value:
            instead = f" Write it in `model.config.{own}`." if hasattr(config, own) else ""
            raise ModelError(f"{key}: `{config.model_type}` would use `{own}: {built.get(own)}` instead.{instead}")


def rewritten_type(text: str, kind: str, values: Mapping[str, Any]) -> str:
    """Return a sentence where transformers' error is about another `rope_type` than the one that was written.

    >>> rewritten_type("missing for 'rope_type'='longrope'", "phi3", {"rope_scaling": {"rope_type": "yarn"}})
    ' `phi3` takes `rope_type: yarn` for `longrope`.'
    """
    found = re.search(r"'rope_type'='(\w+)'", text)
    scaling = values.get("rope_scaling", values.get(ROPE))
    written = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if found is None or not isinstance(written, str) or written == found[1]:
        return ""
    return f" `{kind}` takes `rope_type: {written}` for `{found[1]}`."


def rope_scaling_values(config: PreTrainedConfig, section: RopeScalingSection) -> dict[str, Any]:
    """Return the values of the config for `model.rope_scaling`: the scaling, and as many positions as it gives.

    In a model with layers of full and of sliding attention, only the former see further. Raises ModelError.
    """
    text = config.get_text_config()
    if ROPE not in known_names(type(text)):
        raise ModelError(f"{ROPE_SCALING_KEY}: `{text.model_type}` has no rotary position embedding. Remove it.")
    old: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = _by_layer(old)
    if nested and not nested.keys() <= {_FULL_ATTENTION, _SLIDING_ATTENTION}:
        raise ModelError(
            f"{ROPE_SCALING_KEY}: `{text.model_type}` has one for each of {', '.join(nested)}. Write "
            "`rope_scaling` in `model.config` with those that are to change."
        )
    current = nested.get(_FULL_ATTENTION, {}) if nested else old
    now = getattr(text, "max_position_embeddings", None)
    if not isinstance(now, int):
        raise ModelError(f"{ROPE_SCALING_KEY}: `{text.model_type}` has no number of positions. Remove it.")
    origin = section.original_max_position_embeddings or _origin(text, current)
    positions = int(origin * section.factor)
    if positions < now:
        raise ModelError(
            f"{ROPE_SCALING_KEY}: {origin:,} positions x {section.factor:g} are {positions:,}, and the model already "
            f"has {now:,}. Write a larger `factor`."
        )
    scaling: dict[str, Any] = {"rope_type": section.rope_type, "factor": section.factor}
    scaling |= {_ORIGIN: origin} if section.rope_type == "yarn" else {}
    values = {"rope_scaling": {_FULL_ATTENTION: scaling} if nested else scaling, "max_position_embeddings": positions}
    return values if text is config else {_name_of(text, config): values}


def _name_of(text: PreTrainedConfig, config: PreTrainedConfig) -> str:
    """Return the name of the sub-config; raises ModelError where it lies deeper."""
    for name in sub_configs(type(config)):
        if getattr(config, name, None) is text:
            return name
    raise ModelError(f"{ROPE_SCALING_KEY}: `{config.model_type}` is not supported. Write it in `model.config`.")


def rope_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of those values that scale rotary embeddings, in a text config, too."""
    inner = [name for each in values.values() if isinstance(each, Mapping) for name in rope_names(each)]
    return [name for name in values if name in ("rope_scaling", ROPE, "rope_theta")] or inner


def rotary_parameters(config: PreTrainedConfig) -> Any:
    """Return what the config says of rotary embeddings."""
    return getattr(config.get_text_config(), ROPE, None)


def is_remote_code(model: PreTrainedModel) -> bool:
    """Return whether the model's code came with its weights."""
    return not type(model).__module__.startswith("transformers.")


def uses_scaling(model: PreTrainedModel, usual: PreTrainedModel) -> bool:
    """Return whether the rotary embeddings of the model are others than those of the usual one; both may be on meta."""
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
