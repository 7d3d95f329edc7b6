"""The architecture of a model: its transformers config, from the hub or `model.from_config`, and its head.

Every value of `model.from_config` is checked by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import FinetuneError, ModelError
from finetune.model.loading.config_values import (
    CONFIG_KEY,
    DECODER_START_TOKEN,
    ROPE_SCALING_KEY,
    check_names,
    sub_config_class,
    sub_configs,
    suggestion,
    with_config_values,
)
from finetune.model.loading.hub import error_summary, is_local_path, loading_errors, resolve_name
from finetune.model.loading.pretrained import ADAPTER_CONFIG, load_auto_class, read_config_content
from finetune.runtime.upstream import is_offline, without_hub_retries

HEADS: Mapping[str, Any] = {
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "image_classification": AutoModelForImageClassification,
    "image_text_to_text": AutoModelForImageTextToText,
    "seq2seq_lm": AutoModelForSeq2SeqLM,
    "masked_lm": AutoModelForMaskedLM,
    "causal_lm": AutoModelForCausalLM,
    "embedding": AutoModel,
}
"""In the order in which the head of a saved model is inferred from its class."""

NEW_HEADS = frozenset({"sequence_classification", "token_classification", "image_classification"})
"""Heads that pre-trained weights may lack: they are initialized from the seed and trained."""

_TEXT_CONFIG_VALUES = ("pad_token_id",)
"""Values that a model of images and text reads from its text config."""

HEAD_PARAMETERS_IN_BODY = ("pooler.",)
"""Parameters of the body that only these heads use, and that weights without such a head lack."""


def set_config_values(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    """Set these values in the config; those about text are set in its text config, too."""
    text = config.get_text_config()
    for name, value in values.items():
        setattr(config, name, value)
        if name in _TEXT_CONFIG_VALUES:
            setattr(text, name, value)


def new_head_modules(model: PreTrainedModel, *, head: str) -> tuple[str, ...]:
    """Return the names of the modules of a new head, which is always fully trained; none for other heads."""
    if head not in NEW_HEADS:
        return ()
    return tuple(
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and next(child.parameters(), None) is not None
    )


FROM_CONFIG_KEY = "model.from_config"
TEXT_CONFIG = "text_config"


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of the tokenizer's special tokens; None if it has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def build_model_config(
    section: FromConfigSection, *, vocabulary_size: int | None, special_ids: SpecialTokenIds
) -> PreTrainedConfig:
    """Return the config of the model type with the given values; raises ModelError for an unknown one.

    `vocab_size` is the tokenizer's unless given, and never smaller; special token ids are the tokenizer's. If the
    config has a text config (`text_config`), they are set there.
    """
    if section.model_type not in CONFIG_MAPPING:
        near = suggestion(section.model_type, list(CONFIG_MAPPING.keys()))
        raise ModelError(f"{FROM_CONFIG_KEY}.model_type: transformers has no model type `{section.model_type}`.{near}")
    config_class = CONFIG_MAPPING[section.model_type]
    check_names(config_class, section.values, key=f"{FROM_CONFIG_KEY}.values", is_new=True)
    values, key = dict(section.values), f"{FROM_CONFIG_KEY}.values"
    if vocabulary_size is not None and TEXT_CONFIG in sub_configs(config_class):
        text = values.get(TEXT_CONFIG) or {}
        text_class = sub_config_class(config_class, TEXT_CONFIG, text)
        values[TEXT_CONFIG] = _with_vocabulary(
            text, text_class, vocabulary_size, special_ids, key=f"{key}.{TEXT_CONFIG}"
        )
    elif vocabulary_size is not None:
        values = _with_vocabulary(values, config_class, vocabulary_size, special_ids, key=key)
    with config_value_errors(section.model_type, key=key):
        config = AutoConfig.for_model(section.model_type, **values)
        if vocabulary_size is not None and config.is_encoder_decoder and DECODER_START_TOKEN not in values:
            # A decoder starts with EOS or BOS if it does in the default config, else with padding.
            default = type(config)()
            start = getattr(default, DECODER_START_TOKEN, None)
            ids = {"eos_token_id": special_ids.eos, "bos_token_id": special_ids.bos}
            same = [token for name, token in ids.items() if start is not None and start == getattr(default, name, None)]
            first = next((token for token in same if token is not None), special_ids.pad)
            setattr(config, DECODER_START_TOKEN, first)
        return config


def values_key(section: ModelSection) -> str:
    """Return the key of the values that may prevent building the model."""
    if section.from_config is not None:
        return f"{FROM_CONFIG_KEY}.values"
    if section.config:
        return CONFIG_KEY
    return "model.name" if section.rope_scaling is None else ROPE_SCALING_KEY


@contextmanager
def config_value_errors(model_type: str, *, key: str) -> Iterator[None]:
    """Turn any error of transformers about the values of a config into one ModelError."""
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        is_clear = isinstance(error, ValueError | StrictDataclassError)
        reason = error_summary(error) if is_clear else f"{type(error).__name__}: {error_summary(error)}"
        advice = "Check its config.json." if key == "model.name" else "Change or remove the value."
        raise ModelError(f"{key}: `{model_type}` cannot be built with these values: {reason} {advice}") from error


def _with_vocabulary(
    values: Mapping[str, Any], config_class: Any, vocabulary_size: int, special_ids: SpecialTokenIds, *, key: str
) -> dict[str, Any]:
    """Return the values with the tokenizer's as defaults; raises ModelError if the vocabulary is too small.

    A special token that the config requires but the tokenizer lacks is set to the end-of-sequence token.
    """
    defaults: dict[str, Any] = {"vocab_size": vocabulary_size}
    ids = {"bos_token_id": special_ids.bos, "eos_token_id": special_ids.eos, "pad_token_id": special_ids.pad}
    fields = getattr(config_class, "__dataclass_fields__", {})
    for name, token in ids.items():
        is_required = name in fields and fields[name].type is int
        defaults[name] = special_ids.eos if token is None and is_required else token
    values = defaults | dict(values)
    size = values["vocab_size"]
    if isinstance(size, int) and size < vocabulary_size:
        raise ModelError(
            f"{key}.vocab_size: {size} is smaller than the tokenizer's {vocabulary_size} tokens. "
            f"Remove it, or write at least {vocabulary_size}."
        )
    return values


def load_model_config(section: ModelSection) -> PreTrainedConfig:
    """Return the config of the section's model, with the default vocabulary; raises ModelError."""
    if section.from_config is None:
        return load_pretrained_config(section)
    return build_model_config(section.from_config, vocabulary_size=None, special_ids=SpecialTokenIds())


def pretrained_arguments(section: ModelSection) -> dict[str, Any]:
    """Return the arguments of `load_auto_class` that locate the model; raises ModelError for an adapter's folder."""
    name = section.name or ""
    source = resolve_name(name, key="model.name")
    if is_local_path(name) and (Path(source) / ADAPTER_CONFIG).exists():
        raise ModelError(
            f"model.name: {source} contains an adapter, not a model. Use the base it was trained on "
            "(`base_model_name_or_path` in its adapter_config.json)."
        )
    return {
        "source": source,
        "revision": section.revision,
        "cache_dir": section.cache_folder,
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": is_local_path(name) or is_offline(),
    }


def load_pretrained_config(section: ModelSection) -> PreTrainedConfig:
    """Return the config of `model.name` with the job's `model.config` and `rope_scaling`; raises ModelError."""
    name, origin = str(section.name), pretrained_arguments(section)
    with loading_errors(name, key="model.name"), without_hub_retries(is_local=is_local_path(name)):
        config: PreTrainedConfig = load_auto_class(AutoConfig, **origin)
        content = read_config_content(config, **origin) if section.config_changes else {}
    if not section.config_changes:
        return config
    return with_config_values(config, section.config, content=content, rope_scaling=section.rope_scaling)


SEQ2SEQ_HEAD = "seq2seq_lm"


def check_decoder_start(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that does not read text, or whose config lacks the decoder's first token."""
    config: Any = model.config
    if not config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise ModelError(
            f"`{config.model_type}` does not translate text to text, so `task.name: seq2seq` cannot train it. Use an "
            "encoder-decoder such as T5, BART or NLLB, or `task.name: sft`."
        )
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    try:
        if shift is not None:
            shift(labels=torch.zeros(1, 2, dtype=torch.long))
        elif None in (config.decoder_start_token_id, config.pad_token_id):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"`{config.model_type}`: the decoder's first token is unknown, because the config lacks "
            "`decoder_start_token_id` or `pad_token_id`. Write both in config.json or in `model.from_config.values` "
            "(T5 models start with the padding token)."
        ) from error
