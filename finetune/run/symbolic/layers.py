"""The layers of a model by kind: which of them are alike, and copies of the model with a few of them.

What a step takes is linear in the number of layers of each kind. A model is traced with few layers, once more for each
kind with one layer more of it, and the rest is multiplication.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

MIN_LAYERS = 2
"""Layers of a stack in the smallest copy: its first and its last are two."""

_MAX_KINDS = 6
"""A model with more types of layers than that is traced whole."""

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
"""Values of a config with a number of layers."""

_INDICES = ("layer_idx", "layer_index", "layer_id", "layer_number")
"""Attributes of a module with the place of its layer."""

Chosen = Mapping[str, Sequence[int]]
"""Of each stack, by its name in the model: the places of the layers that stay."""


@dataclass(frozen=True)
class LayerStack:
    """A list of layers, one after the other."""

    name: str
    types: tuple[int, ...]  # of each layer: the place of the first that is like it


def find_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """Return the model's outermost lists of layers; experts and the like are parts of a layer."""
    found: list[LayerStack] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{each.name}.") for each in found)
        if is_inside or not isinstance(module, nn.ModuleList) or len(module) < MIN_LAYERS:
            continue
        if all(any(True for _ in layer.parameters()) for layer in module):
            found.append(LayerStack(name, _layer_types(_owner(model, name), module)))
    return tuple(found)


def smallest(stacks: Sequence[LayerStack]) -> Chosen:
    """Return the fewest layers in which each kind is, in their order, and no stack is a single layer."""
    return {each.name: _with_more(each, set(each.types), least=min(MIN_LAYERS, len(each.types))) for each in stacks}


def enlarged(stacks: Sequence[LayerStack], chosen: Chosen) -> Iterator[tuple[int, Chosen]]:
    """Yield for each kind that has more layers: how many more, and the chosen layers with one of them more."""
    for stack in stacks:
        own = chosen[stack.name]
        num_kept = Counter(stack.types[place] for place in own)
        for kind, number in Counter(stack.types).items():
            rest = number - num_kept[kind]
            if rest:
                another = next(place for place, each in enumerate(stack.types) if each == kind and place not in own)
                yield rest, {**chosen, stack.name: sorted([*own, another])}


def can_be_extrapolated(stacks: Sequence[LayerStack]) -> bool:
    """Tell whether few types of layers make up the model."""
    return 0 < sum(len(set(each.types)) for each in stacks) <= _MAX_KINDS


def with_layers(model: Any, chosen: Chosen) -> Any:
    """Return a copy of the model with these layers alone, which count as a smaller model of its type."""
    whole = {name: model.get_submodule(name) for name in chosen}
    for name, places in chosen.items():
        _set(model, name, nn.ModuleList([whole[name][place] for place in places]))
    try:
        small = copy.deepcopy(model)
    finally:
        for name, layers in whole.items():
            _set(model, name, layers)
    for name, places in chosen.items():
        _renumber(small.get_submodule(name), places)
    seen: set[int] = set()
    for name, places in chosen.items():
        config = getattr(_owner(small, name), "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            _shorten(config, places, length=len(whole[name]))
    return small


def _with_more(stack: LayerStack, types: set[int], *, least: int) -> list[int]:
    places = sorted(types)
    others = [place for place in range(len(stack.types)) if place not in types]
    return sorted([*places, *others[: max(0, least - len(places))]])


def _layer_types(owner: nn.Module, layers: nn.ModuleList) -> tuple[int, ...]:
    lists = [
        value
        for value in vars(getattr(owner, "config", object)).values()
        if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    prints = [
        (_fingerprint(layer, place), tuple(repr(each[place]) for each in lists)) for place, layer in enumerate(layers)
    ]
    return tuple(prints.index(each) for each in prints)


def _fingerprint(layer: nn.Module, place: int) -> tuple[Any, ...]:
    """Return what two layers that take the same memory have in common: classes, shapes and plain attributes."""
    return tuple(
        (
            name,
            type(module),
            tuple((own, tuple(each.shape), each.dtype) for own, each in module.named_parameters(recurse=False)),
            tuple(
                (own, value)
                for own, value in sorted(vars(module).items())
                if own not in _INDICES and isinstance(value, bool | int | float | str) and not own.startswith("_")
            ),
        )
        for name, module in layer.named_modules()
    )


def _renumber(layers: nn.Module, places: Sequence[int]) -> None:
    for new, (old, layer) in enumerate(zip(places, layers.children(), strict=True)):
        for module in layer.modules():
            for name in _INDICES:
                if vars(module).get(name) == old:
                    setattr(module, name, new)


def _shorten(config: Any, places: Sequence[int], *, length: int) -> None:
    """Have a config describe the layers that are left: their number, and every list with an entry for each."""
    for name, value in list(vars(config).items()):
        if name in _COUNTS and value == length:
            setattr(config, name, len(places))
        elif isinstance(value, list | tuple) and len(value) == length:
            setattr(config, name, type(value)(value[place] for place in places))


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _set(model: nn.Module, name: str, layers: nn.Module) -> None:
    setattr(_owner(model, name), name.rpartition(".")[2], layers)
