"""What a sharding strategy asks of a model: its width, and the layers that may not be cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from finetune.model.embeddings import input_embeddings

_NAMES = "_no_split_modules"
_WIDTHS = ("hidden_size", "hidden_sizes")


def name_own_layers(model: PreTrainedModel) -> None:
    """Leave the model with those names of whole layers that it has layers of, and that hold no input embeddings.

    Accelerate gives the embeddings to a unit of FSDP2 of their own, together with the head that they are tied to, and
    fails where a layer's unit has them already, as BERT's embeddings layer would (accelerate 1.15).

    A model with a CLIP image encoder names CLIP's text embeddings, too, and Accelerate's FSDP policy refuses a name
    without a layer ("Could not find the transformer layer class", accelerate 1.15 with transformers 5.23). May go when
    either of them leaves such names out.
    """
    embeddings = input_embeddings(model)
    kinds = {
        type(module).__name__
        for module in model.modules()
        if embeddings is None or all(each is not embeddings for each in module.modules())
    }
    names = getattr(model, _NAMES, None) or ()
    own = [name for name in names if name in kinds]
    if own and len(own) < len(names):
        setattr(model, _NAMES, set(own) if isinstance(names, set) else own)


def share_input_embeddings(model: PreTrainedModel) -> None:
    """Let modules that are the same table as the input embeddings be that very module.

    Encoder and decoder of a T5 have one each, with one weight. FSDP2 refuses a weight that stands in several of its
    units; a module it finds but once.
    """
    embeddings = input_embeddings(model)
    if embeddings is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is not embeddings and _is_same_table(child, embeddings):
                setattr(parent, name, embeddings)


def _is_same_table(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two embeddings have one weight and make the same of it."""
    if type(one) is not type(other) or not isinstance(one, nn.Embedding):
        return False
    settings = [
        {name: value for name, value in vars(each).items() if not name.startswith("_")} for each in (one, other)
    ]
    return one.weight is other.weight and settings[0] == settings[1]


@contextmanager
def telling_width(config: Any) -> Iterator[None]:
    """Have the config tell the width of its text part meanwhile, where it has none of its own.

    Accelerate fills ZeRO-3's `auto` buckets by `config.hidden_size` and refuses a model of images and text, which has
    it in `text_config` (accelerate 1.15). May go when it asks `get_text_config()`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, _WIDTHS[0], None)
    if width is None or any(hasattr(config, name) for name in _WIDTHS):
        yield
        return
    setattr(config, _WIDTHS[0], width)
    try:
        yield
    finally:
        delattr(config, _WIDTHS[0])
