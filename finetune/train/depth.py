"""How far below a model's head a parameter lies, read from its name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LAYER = re.compile(
    r"^(?P<stack>(?:.*?\.)??)(?:stages\.(?P<stage>\d+)\.)?(?:layers|layer|h|blocks|block)\.(?P<number>\d+)\."
)
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|shared)(?:\.|$)")


@dataclass(frozen=True)
class Place:
    """A layer of a stack: `stack` is the name before its number, `number` counts from the bottom."""

    stack: str
    number: tuple[int, int]  # stage (0 where there are none) and layer


def layer_of(name: str) -> Place | None:
    """Return the layer in which the parameter lies; None for embeddings, heads and what stands between.

    The first of `layers.N.`, `layer.N.`, `h.N.`, `blocks.N.` and `block.N.` counts, behind `stages.N.` where the model
    has stages.
    """
    found = _LAYER.match(name)
    return None if found is None else Place(found["stack"], (int(found["stage"] or 0), int(found["number"])))


def is_embedding(name: str) -> bool:
    """Tell whether the parameter turns what is read into vectors."""
    return layer_of(name) is None and _EMBEDDING.search(name) is not None


def depths(aliases: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return by name how many layers a parameter lies below the head.

    Heads and norms behind the last layer are at 0, the last layer of each stack (encoder and decoder alike) at 1, and
    embeddings one below the first layer of the longest stack. `aliases` are all names of each parameter: one that is
    embedding and head at once is an embedding. Empty where no name has the number of a layer.
    """
    places = {name: layer_of(name) for name in aliases}
    stacks: dict[str, set[tuple[int, int]]] = {}
    for place in places.values():
        if place is not None:
            stacks.setdefault(place.stack, set()).add(place.number)
    if not stacks:
        return {}
    from_bottom = {stack: sorted(numbers) for stack, numbers in stacks.items()}
    below = max(map(len, stacks.values())) + 1
    found: dict[str, int] = {}
    for name, place in places.items():
        if place is not None:
            numbers = from_bottom[place.stack]
            found[name] = len(numbers) - numbers.index(place.number)
        else:
            found[name] = below if any(map(is_embedding, aliases[name])) else 0
    return found
