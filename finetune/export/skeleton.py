"""The plain model without values: what must be written, whatever has become of the trained one's parameters."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from finetune.model.adapters.wish import is_adapted

ADAPTER = "default"


def base_skeleton(model: PreTrainedModel, *, dtype: torch.dtype, is_untied: bool = False) -> PreTrainedModel:
    """Return a model of the same class and config whose parameters have shapes and no memory.

    Wrapping leaves the trained model with empty, flattened or renamed parameters (ZeRO-3, FSDP1) or another class
    (FSDP2); the skeleton's names, shapes and ties are those that `from_pretrained` will look for. With `is_untied` its
    output embeddings are weights of their own, and its config says so.
    """
    config = copy.deepcopy(model.config)
    config.use_cache = True  # off only while training
    if is_untied:
        for each in (config, config.get_text_config(decoder=True)):
            each.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):  # it is about a base in few bits, and what is written has all of them
        del config.quantization_config
    with torch.device("meta"), set_zero3_state():  # else the parts of a model of parts speak to the other ranks
        skeleton = _plain_class(model)(config)
    skeleton.to(dtype)
    skeleton.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    if hasattr(model, "_weight_conversions"):  # how the checkpoint's names differ from the model's; undone on saving
        skeleton._weight_conversions = model._weight_conversions
    return skeleton


def plain_base(model: Any) -> PreTrainedModel:
    """Return the transformers model itself, from under its adapters where it has some."""
    return model.get_base_model() if is_adapted(model) else model


def _plain_class(model: PreTrainedModel) -> Any:
    """Return the class as transformers defines it: FSDP2 puts one of its own before it."""
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind for kind in classes if not any("fsdp" in base.__module__ for base in kind.__mro__))
