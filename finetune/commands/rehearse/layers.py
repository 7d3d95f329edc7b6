"""The layers of a model: which kinds there are, how many of them are kept, and where an index of the real one lands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

MIN_LAYERS = 2
MAX_PREFIX = 16
"""More layers than these are kept only where the kinds of layers cannot be picked from a list in the config."""


@dataclass(frozen=True)
class Stack:
    """A list of layers in a model: its name, and the kind of every layer."""

    name: str
    kinds: tuple[str, ...]


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the lists of layers that are in no other list, in the order of the modules.

    A kind is told by the classes of a layer's modules, the names of its parameters, and its switches.
    """
    found: list[Stack] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{each.name}.") for each in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_inside:
            found.append(Stack(name, tuple(_kind(layer) for layer in module)))
    return found


def _kind(layer: nn.Module) -> str:
    return "; ".join(
        f"{name}:{type(module).__name__}({', '.join(_switches(module))})" for name, module in layer.named_modules()
    )


def _switches(module: nn.Module) -> Iterator[str]:
    """Yield the parameters' names and what is true or false or a word of this module, but not whether it trains."""
    yield from (name for name, each in module._parameters.items() if each is not None)
    for name, value in sorted(vars(module).items()):
        if isinstance(value, bool | str) and name != "training" and not name.startswith("_"):
            yield f"{name}={value}"
        elif name in ("sliding_window", "window_size", "attention_chunk_size"):
            yield f"{name}={value is not None}"


def kept_layers(layer_kinds: Sequence[str], *, can_pick: bool) -> tuple[int, ...]:
    """Return which layers are kept: the first ones until every kind is there, at least two.

    Where these would be too many and the config lists its layers, the first of every kind.

    >>> kept_layers("aaaa", can_pick=False), kept_layers("a" * 40 + "b", can_pick=True)
    ((0, 1), (0, 40))
    """
    firsts = {kind: index for index, kind in reversed(list(enumerate(layer_kinds)))}
    needed = max(max(firsts.values(), default=0) + 1, MIN_LAYERS)
    if needed > MAX_PREFIX and can_pick:
        picked = sorted(firsts.values())
        return tuple(picked if len(picked) >= MIN_LAYERS else [*picked, picked[-1] + 1])
    return tuple(range(min(needed, len(layer_kinds))))


def map_index(index: int, *, real: Sequence[str], small: Sequence[str]) -> int:
    """Return the layer of the small model that stands for one of the real model: as deep, and of the same kind.

    >>> [map_index(each, real="aaaa", small="aa") for each in range(4)]
    [0, 0, 1, 1]
    """
    wanted = index * len(small) / len(real)
    same = [place for place, kind in enumerate(small) if kind == real[index]] or range(len(small))
    return min(same, key=lambda place: abs(place - int(wanted)))


def is_count(value: Any) -> bool:
    """Tell whether the value is a whole number, and neither true nor false."""
    return isinstance(value, int) and not isinstance(value, bool)
