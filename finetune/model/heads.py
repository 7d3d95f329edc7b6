"""Heads: what stands on the body of a model, and which of its parameters that is."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import (
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

HEADS: Mapping[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "seq2seq_lm": AutoModelForSeq2SeqLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "image_classification": AutoModelForImageClassification,
    "image_text_to_text": AutoModelForImageTextToText,
}

NEW_HEADS = frozenset({"sequence_classification", "token_classification", "image_classification"})
"""Heads that pre-trained weights need not bring along: they are drawn from the seed, and learnt."""

_OF_TEXT = ("pad_token_id",)
"""Values that a model of images and text looks for in the config of its text."""

_OTHERS_OF_HEAD = ("pooler.",)
"""Parameters of the body that only such a head uses, and that weights without one lack."""


def set_values(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    """Give the config these values; those of text are given to the part that is about text, too."""
    text = config.get_text_config()
    for name, value in values.items():
        setattr(config, name, value)
        if name in _OF_TEXT:
            setattr(text, name, value)


def is_of_head(name: str, model: PreTrainedModel) -> bool:
    """Tell whether the parameter of that name belongs to the head."""
    prefix = f"{model.base_model_prefix}."
    return not name.startswith(prefix) or name.removeprefix(prefix).startswith(_OTHERS_OF_HEAD)


def head_modules(model: PreTrainedModel, *, head: str) -> tuple[str, ...]:
    """Return the names of the modules of a new head, which learn in full whatever is frozen; none of others."""
    if head not in NEW_HEADS:
        return ()
    return tuple(
        name for name, child in model.named_children() if name != model.base_model_prefix and _has_parameters(child)
    )


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
