"""Values of a pre-trained model's config that the job changes (`model.config`): checked, and merged into the config."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from finetune.config.sections.model import RopeScalingSection
from finetune.errors import ModelError
from finetune.model.loading.config_names import ROPE_VALUES, known_names, sub_configs, suggestion
from finetune.model.loading.rope import (
    ROPE,
    ROPE_SCALING_KEY,
    merged_rope,
    require_as_written,
    rewritten_type,
    rope_scaling_values,
    rope_values,
)
from finetune.model.upstream import written_head_size

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


def check_names(config_class: Any, values: Mapping[str, Any], *, key: str) -> None:
    """Raise ModelError for a value that the config does not have or that is set by another key."""
    known = known_names(config_class)
    for name in values:
        if name in _SET_ELSEWHERE:
            raise ModelError(f"{key}.{name}: write `{_SET_ELSEWHERE[name]}` instead.")
        if name in _NOT_OF_THE_MODEL:
            raise ModelError(f"{key}.{name}: it does not affect the model's computation. Remove it.")
        if name not in known:
            hint = suggestion(name, sorted(known))
            model_type = getattr(config_class, "model_type", "") or config_class.__name__
            raise ModelError(f"{key}.{name}: the config of `{model_type}` has no such value.{hint}")


def _merged(
    config: PreTrainedConfig, values: Mapping[str, Any], *, content: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return the content of the config with the values; those of sub-configs are merged, too."""
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
    collected = _Collector()
    level = logger.level
    logger.addHandler(collected)
    logger.setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:
        text = " ".join(line.strip() for line in str(error).partition("Errors:")[0].splitlines() if line.strip())
        text = text.strip('".')
        key = _key_in(text, values, has_rope_scaling=has_rope_scaling)
        raise ModelError(
            f"{key}: the value is invalid for `{model_type}`: {text}.{rewritten_type(text, model_type, values)}"
        ) from error
    finally:
        logger.removeHandler(collected)
        logger.setLevel(level)
    if collected.messages:
        text = collected.messages[0].rstrip(".")
        key = _key_in(text, values, has_rope_scaling=has_rope_scaling)
        raise ModelError(f"{key}: {text}.{rewritten_type(text, model_type, values)}")


def _key_in(text: str, values: Mapping[str, Any], *, has_rope_scaling: bool) -> str:
    """Return the key that an error of transformers refers to, or the section if the error does not name one."""
    if "rope" in text and has_rope_scaling:
        return ROPE_SCALING_KEY
    names = [name for name in values if re.search(rf"['`]{re.escape(name)}['`]", text)]
    if not names and "rope" in text:
        names = list(rope_values(values))
    return f"{CONFIG_KEY}.{names[0]}" if names else CONFIG_KEY


class _Collector(logging.Handler):
    """Collects warnings about values that would be ignored or that are not numbers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the message."""
        text = record.getMessage()
        if any(words in text for words in ("Unrecognized keys", "field must be", "Missing validation function")):
            self.messages.append(text)
