"""Values of a model's config: which can be set, and the job's changes, checked and merged into the config.

Among them the scaling of rotary positions, for a pre-trained model (`model.config`, `model.rope_scaling`) or a new one.
transformers keeps its base, type and factor in `rope_parameters`, in one mapping or in one per layer type;
`rope_scaling` and `rope_theta` are older names for parts of it.
"""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.config.sections.model import RopeScalingSection
from finetune.errors import ModelError
from finetune.model.upstream import written_head_size

ROPE_VALUES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Values that transformers folds into `rope_parameters`."""
DECODER_START_TOKEN = "decoder_start_token_id"
"""The first token of a decoder; not every config of an encoder-decoder declares it."""

_LOOKED_UP = re.compile(
    r"(?:get|has)attr\((?:self\.)?config, .(head_dim|classifier_dropout|hidden_dropout|sliding_window)\b"
)
"""Values that models look up in their config, although not every config class declares them."""


def known_names(config_class: type[Any]) -> frozenset[str]:
    """Return the names of all values that can be set in the config: the parameters of its class, and their aliases."""
    names: set[str] = set(getattr(config_class, "attribute_map", {}))
    for owner in (config_class, PreTrainedConfig):
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(owner.__init__).parameters
        names.update(name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD)
    names |= ROPE_VALUES if "rope_parameters" in names else frozenset()
    names |= {DECODER_START_TOKEN} if getattr(config_class, "is_encoder_decoder", False) is True else frozenset()
    if looked_up := _looked_up(inspect.getfile(config_class)) - names:
        own = inspect.getsource(config_class)  # may compute a value itself
        names |= {name for name in looked_up if not hasattr(config_class, name) and f"self.{name} = " not in own}
    return frozenset(names - {"self"})


@cache
def _looked_up(config_file: str) -> frozenset[str]:
    """Return the values that the model next to the config's file looks up."""
    model_file = Path(config_file).with_name(Path(config_file).name.replace("configuration_", "modeling_"))
    return frozenset(_LOOKED_UP.findall(model_file.read_text(encoding="utf-8")) if model_file.is_file() else ())


def suggestion(name: str, names: list[str]) -> str:
    """Return a sentence with the most similar name; empty if none is similar."""
    matches = get_close_matches(name, names, n=1)
    return f" Did you mean `{matches[0]}`?" if matches else ""


def sub_configs(config_class: Any) -> Mapping[str, Any]:
    """Return the sub-configs by name, such as `text_config` and `vision_config`."""
    return getattr(config_class, "sub_configs", None) or {}


def sub_config_class(config_class: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Return the class of a sub-config; None if it cannot be determined before loading."""
    if sub_configs(config_class)[name] is not AutoConfig:
        return sub_configs(config_class)[name]
    defaults = getattr(config_class, "sub_configs_defaults", {})
    model_type = values.get("model_type") or getattr(defaults.get(name), "model_type", None)
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  # `get` loads nothing


CONFIG_KEY, ROPE_SCALING_KEY = "model.config", "model.rope_scaling"

DEDICATED_KEYS = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.gradient_checkpointing",
}
"""Values that have a key of their own in a job."""

_SET_ELSEWHERE = {
    **DEDICATED_KEYS,
    "quantization_config": "model.quantization",
    "vocab_size": "model.new_tokens",
    "num_labels": "task.classification",
    "id2label": "task.classification",
    "label2id": "task.classification",
    "problem_type": "task.classification",
}

# fmt: off
_NOT_OF_THE_MODEL = frozenset({
    "architectures", "model_type", "transformers_version", "name_or_path", "return_dict", "use_cache",
    "output_hidden_states", "output_attentions", "is_encoder_decoder", "is_decoder", "auto_map", "use_return_dict",
})
# fmt: on
"""Values that identify the model or select its outputs, and do not change its computation."""


def with_config_values(
    config: PreTrainedConfig,
    values: Mapping[str, Any],
    *,
    content: Mapping[str, Any],
    rope_scaling: RopeScalingSection | None = None,
) -> PreTrainedConfig:
    """Return a config with these values changed; raises ModelError naming the key.

    `content` is the content of its config.json, from which the class derives its other values again.
    """
    check_names(type(config), values, key=CONFIG_KEY)
    changed = _merged(config, values, content=content, key=CONFIG_KEY)
    key, rope = CONFIG_KEY, values
    if rope_scaling is not None:
        key, rope = ROPE_SCALING_KEY, rope_scaling_values(config, rope_scaling)
        changed = _merged(config, rope, content=changed, key=key)
    with _config_errors(config.model_type, {**values, **rope}, has_rope_scaling=rope_scaling is not None):
        new = type(config).from_dict(changed)
    require_as_written(new, rope, key=key)
    for name in ("_name_or_path", "_commit_hash"):  # not in the content of config.json
        if hasattr(config, name):
            setattr(new, name, getattr(config, name))
    return new


def check_names(config_class: Any, values: Mapping[str, Any], *, key: str, is_new: bool = False) -> None:
    """Raise ModelError for a value that the config does not have or that another key sets.

    For a new model (`is_new`), also in sub-configs.
    """
    known, model_type = known_names(config_class), getattr(config_class, "model_type", "") or config_class.__name__
    elsewhere = DEDICATED_KEYS if is_new else _SET_ELSEWHERE
    for name, value in values.items():
        if name in elsewhere:
            raise ModelError(f"{key}.{name}: write `{elsewhere[name]}` instead.")
        if not is_new and name in _NOT_OF_THE_MODEL:
            raise ModelError(f"{key}.{name}: it does not affect the model's computation. Remove it.")
        if name not in known:
            hint = suggestion(name, sorted(known))
            raise ModelError(f"{key}.{name}: the config of `{model_type}` has no such value.{hint}")
        if is_new and name in sub_configs(config_class) and isinstance(value, Mapping):
            inner = {part: inner_value for part, inner_value in value.items() if part != "model_type"}
            if (inner_class := sub_config_class(config_class, name, value)) is not None:
                check_names(inner_class, inner, key=f"{key}.{name}", is_new=True)


def _merged(
    config: PreTrainedConfig, values: Mapping[str, Any], *, content: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return the content of the config with the values; sub-configs are merged, too."""
    content, rope = dict(content), rope_values(values)
    own_names = getattr(config, "attribute_map", {})
    for name, value in values.items():
        part = getattr(config, name, None)
        if name in sub_configs(type(config)) and isinstance(part, PreTrainedConfig):
            if not isinstance(value, Mapping):
                raise ModelError(f"{key}.{name}: must be a mapping with the values to change.")
            check_names(type(part), value, key=f"{key}.{name}")
            content[name] = _merged(part, value, content=content.get(name) or {}, key=f"{key}.{name}")
        elif name not in rope:
            content[own_names.get(name, name)] = value
    if rope:
        content[ROPE] = merged_rope(config, rope, key=key)
        for name, size in written_head_size(config, content[ROPE]).items():
            content[name] = content.get(name) or size
        for name in ROPE_VALUES & content.keys():
            del content[name]
    return content


@contextmanager
def _config_errors(model_type: str, values: Mapping[str, Any], *, has_rope_scaling: bool) -> Iterator[None]:
    """Turn transformers' errors about values, and its warnings about the rotary embedding, into one ModelError."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    ignored: list[str] = []  # warnings about values that would be ignored or that are not numbers

    def collect(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(words in text for words in ("Unrecognized keys", "field must be", "Missing validation function")):
            ignored.append(text)
        return True

    failure: Exception | None = None
    level = logger.level
    logger.addFilter(collect)
    logger.setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        logger.removeFilter(collect)
        logger.setLevel(level)
    if failure is not None:
        text = " ".join(line.strip() for line in str(failure).partition("Errors:")[0].splitlines()).strip(' ".')
        message = f"the value is invalid for `{model_type}`: {text}"
    elif ignored:
        message = text = ignored[0].rstrip(".")
    else:
        return
    names = [name for name in values if re.search(rf"['`]{re.escape(name)}['`]", text)]
    names = names or (list(rope_values(values)) if "rope" in text else [])
    key = f"{CONFIG_KEY}.{names[0]}" if names else CONFIG_KEY
    key = ROPE_SCALING_KEY if "rope" in text and has_rope_scaling else key
    raise ModelError(f"{key}: {message}.") from failure


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
    return {name: value for name, value in values.items() if name in (ROPE, *ROPE_VALUES)}


def merged_rope(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return `rope_parameters` with a new scaling; other values are kept unless they are given."""
    old: dict[str, Any] = dict(getattr(config, ROPE, None) or {})
    nested = by_layer(old)
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
        for layer_type, scaling in by_layer(written).items() or [("", written)]:
            actual = built.get(layer_type, {}) if layer_type else built
            for part, expected in scaling.items():
                field = "rope_type" if part == "type" else part
                if expected is None or field not in _SCALING_VALUES or actual.get(field) == expected:
                    continue
                advice = f" Write it in `model.config.{field}`." if hasattr(config, field) else ""
                raise ModelError(
                    f"{full_key}: `{config.model_type}` would use `{field}: {actual.get(field)}` instead.{advice}"
                )


def rope_scaling_values(config: PreTrainedConfig, section: RopeScalingSection) -> dict[str, Any]:
    """Return the config values for `model.rope_scaling`: the scaling, and the resulting number of positions.

    In a model with full and sliding attention, only the layers with full attention are scaled. Raises ModelError.
    """
    text = config.get_text_config()
    if ROPE not in known_names(type(text)):
        raise ModelError(f"{ROPE_SCALING_KEY}: `{text.model_type}` has no rotary position embedding. Remove it.")
    old: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = by_layer(old)
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


ROPE = "rope_parameters"
BY_LENGTH = ("dynamic", "longrope")
"""Scaling types whose frequencies depend on the longest sample of a forward pass."""


def by_layer(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of rotary embeddings by layer type; empty if all layers have the same."""
    return {name: inner for name, inner in parameters.items() if isinstance(inner, dict)}


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
    scalings = [*by_layer(parameters).values()] or ([parameters] if parameters else [])
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
