"""The embeddings of a model, where it has any."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def tell_of_none(model: PreTrainedModel) -> None:
    """Have a model without embeddings say so: transformers raises, and Accelerate's FSDP2 (1.15) asks any model."""
    if input_embeddings(model) is None:
        model.get_input_embeddings = _none


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return what embeds the model's inputs; None where transformers knows of no such module, as in a ResNet."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def output_embeddings(model: PreTrainedModel) -> Any:
    """Return what makes logits over a vocabulary; None where nothing does, or nobody knows."""
    try:
        return model.get_output_embeddings()
    except NotImplementedError:
        return None


def _none() -> None:
    return None
