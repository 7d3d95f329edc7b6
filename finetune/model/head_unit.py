"""A head whose parts share a parameter is one unit to a sharding strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from finetune.model.embeddings import output_embeddings


@contextmanager
def whole_head(model: Any) -> Iterator[None]:
    """Have the model name, meanwhile, all of its head as its output embeddings where these share more than the table.

    The bias of BERT's decoder is its head's, too. Accelerate shards the output embeddings as a unit of FSDP2, and torch
    refuses a parameter that stands in two units ("is shared with a parameter already managed by another FSDP group",
    accelerate 1.15, torch 2.13). May go when Accelerate groups all modules that share a parameter. `model` is the one
    inside of adapters.
    """
    decoder = output_embeddings(model)
    head = None if decoder is None else _holder(model, decoder)
    if head is None:
        yield
        return
    kind: Any = type(head)
    kind.weight = property(lambda _: decoder.weight)  # which Accelerate compares with the table
    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings, kind.weight


def _holder(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """Return the module around the decoder that holds one of its parameters as its own; None where none does."""
    own = {id(parameter) for parameter in decoder.parameters()}
    for module in model.modules():
        holds = any(id(parameter) in own for parameter in module.parameters(recurse=False))
        if holds and module is not decoder and any(each is decoder for each in module.modules()):
            return module
    return None
