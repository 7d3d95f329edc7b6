"""The embeddings of a model, where it has any."""

from typing import Any

from torch import nn


def input_embeddings(model: Any) -> nn.Module | None:
    """Return what embeds the model's inputs; None where transformers knows of no such module, as in a ResNet."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def output_embeddings(model: Any) -> nn.Module | None:
    """Return what makes logits over a vocabulary; None where nothing does."""
    try:
        found: nn.Module | None = model.get_output_embeddings()
    except NotImplementedError:
        return None
    return found
