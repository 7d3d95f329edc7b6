"""Parts of a model whose output nothing reads: they cannot learn, and DDP would wait for their gradients for ever."""

import re
from collections.abc import Iterator

from torch import nn

LAYER = "vision_feature_layer"
"""Where LLaVA and its kin say which layer's output is read of an image; those behind it are for nothing."""

_TOWER = "vision_tower"
_BEHIND_THE_LAYERS = ("post_layernorm", "layernorm", "head")


def unread_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules behind the layer of the image encoder that the model reads; mostly none."""
    read = getattr(getattr(model, "config", None), LAYER, None)
    if read is None:
        return ()
    towers = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == _TOWER]
    return tuple(behind for name, tower in towers for behind in _behind(tower, name=name, read=read))


def excluded(model: nn.Module) -> str | None:
    """Return peft's pattern of the modules within those, which get no adapter; None where there are none."""
    names = unread_modules(model)
    return "|".join(rf"{re.escape(name)}(\..*)?" for name in names) or None


def freeze_unread(model: nn.Module) -> None:
    """Stop what nothing reads from learning."""
    for name in unread_modules(model):
        model.get_submodule(name).requires_grad_(False)


def _behind(tower: nn.Module, *, name: str, read: int | list[int]) -> Iterator[str]:
    stacks = [(own, each) for own, each in tower.named_modules() if isinstance(each, nn.ModuleList)]
    if not stacks:
        return
    own, layers = max(stacks, key=lambda stack: len(stack[1]))
    places = [read] if isinstance(read, int) else list(read)
    num_read = max(place if place >= 0 else len(layers) + 1 + place for place in places)
    yield from (f"{name}.{own}.{number}" for number in range(num_read, len(layers)))
    yield from (f"{name}.{each}" for each, _ in tower.named_modules() if each.rpartition(".")[2] in _BEHIND_THE_LAYERS)
