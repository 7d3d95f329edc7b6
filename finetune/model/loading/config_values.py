"""Values of a pre-trained model's config that the job changes (`model.config`): checked, and merged into the config."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.errors import ModelError
from finetune.model.loading.config_names import ROPE_VALUES, known_names, sub_configs

CONFIG_KEY = "model.config"

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

_NOT_OF_THE_MODEL = frozenset(
    {"architectures", "model_type", "transformers_version", "name_or_path", "return_dict", "use_cache"}
    | {"output_hidden_states", "output_attentions", "is_encoder_decoder", "is_decoder", "auto_map", "use_return_dict"}
)
"""Values that say what the model is or what it returns, and change nothing in what it computes."""

_ROPE = "rope_parameters"
_ROPE_TYPES_WITH_ORIGIN = ("yarn", "llama3", "longrope")
"""Kinds of scaling that count from the length of pre-training."""


def with_config_values(
    config: PreTrainedConfig, values: Mapping[str, Any], *, content: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return a config with these values in the place of its own; raises ModelError naming the key.

    `content` is what its config.json holds: what the class derives from it is derived anew.
    """
    check_names(type(config), values, key=CONFIG_KEY)
    changed = _merged(config, values, content=content, key=CONFIG_KEY)
    with _config_errors(config.model_type, values):
        new = type(config).from_dict(changed)
    for name in ("_name_or_path", "_commit_hash"):  # which the plain content does not have
        if hasattr(config, name):
            setattr(new, name, getattr(config, name))
    return new


def check_names(config_class: Any, values: Mapping[str, Any], *, key: str) -> None:
    """Raise ModelError for a value that neither the class nor its model reads, or that another key sets."""
    known = known_names(config_class)
    for name in values:
        if name in _SET_ELSEWHERE:
            raise ModelError(f"{key}.{name}: write `{_SET_ELSEWHERE[name]}` instead.")
        if name in _NOT_OF_THE_MODEL:
            raise ModelError(f"{key}.{name}: it changes nothing in what the model computes. Remove it.")
        if name not in known:
            hint = suggestion(name, sorted(known))
            raise ModelError(
                f"{key}.{name}: neither the config nor the model of `{_kind(config_class)}` reads it.{hint}"
            )


def suggestion(name: str, names: list[str]) -> str:
    """Return a sentence with the name that is most like it; empty where none is."""
    near = get_close_matches(name, names, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _kind(config_class: Any) -> str:
    return getattr(config_class, "model_type", "") or str(config_class.__name__)


def _merged(
    config: PreTrainedConfig, values: Mapping[str, Any], *, content: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return the content of the config with the values; those of sub-configs are merged likewise."""
    content = dict(content)
    own_names = getattr(config, "attribute_map", {})
    for name, value in values.items():
        part = getattr(config, name, None)
        if name in sub_configs(type(config)) and isinstance(part, PreTrainedConfig):
            if not isinstance(value, Mapping):
                raise ModelError(f"{key}.{name}: must be a mapping of the values that change.")
            check_names(type(part), value, key=f"{key}.{name}")
            content[name] = _merged(part, value, content=content.get(name) or {}, key=f"{key}.{name}")
        elif name == _ROPE or name in ROPE_VALUES:
            continue
        else:
            content[own_names.get(name, name)] = value
    rope = {name: value for name, value in values.items() if name == _ROPE or name in ROPE_VALUES}
    if rope:
        content[_ROPE] = _merged_rope(config, rope, key=key)
        for name in ROPE_VALUES & content.keys():
            del content[name]
    return content


def _merged_rope(config: PreTrainedConfig, values: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return the rotary embedding with other scaling: base and share of rotated channels stay unless written."""
    old: dict[str, Any] = dict(getattr(config, _ROPE, None) or {})
    nested = {name: each for name, each in old.items() if isinstance(each, dict)}
    written = [name for name in ("rope_scaling", _ROPE) if name in values]
    if len(written) > 1:
        raise ModelError(f"{key}.rope_scaling: `rope_parameters` is the same. Keep only one of them.")
    given = values[written[0]] if written else None
    place = f"{key}.{written[0]}" if written else key
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


def _scaled(
    config: PreTrainedConfig, old: Mapping[str, Any], given: Mapping[str, Any], *, replaces: bool, key: str
) -> dict[str, Any]:
    base = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old} if replaces else old
    new = {**base, **given}
    if "type" in new:
        new["rope_type"] = new.pop("type")
    new.setdefault("rope_type", "default")
    if replaces and given and "rope_type" not in given and "type" not in given:
        raise ModelError(f"{key}: `rope_type` is missing. Write `rope_type: yarn` (or `linear`, `llama3`, ...) in it.")
    if new["rope_type"] not in (*ROPE_INIT_FUNCTIONS, "default", old.get("rope_type")):
        hint = suggestion(str(new["rope_type"]), sorted(ROPE_INIT_FUNCTIONS))
        raise ModelError(f"{key}: transformers has no `rope_type: {new['rope_type']}`.{hint}")
    if new["rope_type"] in _ROPE_TYPES_WITH_ORIGIN:
        origin = old.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        new.setdefault("original_max_position_embeddings", origin)
    return new


@contextmanager
def _config_errors(kind: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Turn transformers' errors about values, and its warnings about the rotary embedding, into one ModelError."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    collected = _Collector()
    level = logger.level
    logger.addHandler(collected)
    logger.setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:
        text = " ".join(line.strip() for line in str(error).partition("Errors:")[0].splitlines() if line.strip())
        text = text.strip('".')
        raise ModelError(f"{_key_in(text, values)}: `{kind}` does not take the value: {text}.") from error
    finally:
        logger.removeHandler(collected)
        logger.setLevel(level)
    if collected.messages:
        raise ModelError(f"{_key_in(collected.messages[0], values)}: {collected.messages[0].rstrip('.')}.")


def _key_in(text: str, values: Mapping[str, Any]) -> str:
    """Return the key that an error of transformers is about; the section where that cannot be seen."""
    names = [name for name in values if re.search(rf"['`]{re.escape(name)}['`]", text)]
    if not names and "rope" in text:
        names = [name for name in values if name == _ROPE or name in ROPE_VALUES]
    return f"{CONFIG_KEY}.{names[0]}" if names else CONFIG_KEY


class _Collector(logging.Handler):
    """Keeps warnings about values that would be ignored, or that are no numbers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        text = record.getMessage()
        if any(words in text for words in ("Unrecognized keys", "field must be", "Missing validation function")):
            self.messages.append(text)
