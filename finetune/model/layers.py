"""A model's layer stacks: finding them, comparing their layers, and building a copy with fewer layers.

And its parameters that are not trained, by name patterns or because their module's output is unused: they get no
gradients, for which DDP would wait forever.
"""

import copy
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from finetune.errors import ModelError

MIN_LAYERS = 2
"""Minimum layers of a stack in a shortened model, so that its first and last layer differ."""

LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
)
"""Config keys that are numbers of layers."""

_LAYER_INDICES = ("layer_idx", "layer_index", "layer_id", "layer_number")
"""Attributes of a module that hold the index of its layer."""

_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
_LAYER_PATTERN = "hybrid_override_pattern"
"""Config key of a string with one letter per layer (Nemotron-H)."""

KeptLayers = Mapping[str, Sequence[int]]
"""The indices of the kept layers of every stack, by the stack's name in the model."""


@dataclass(frozen=True)
class LayerStack:
    """A list of layers that run in sequence."""

    name: str
    kinds: tuple[Hashable, ...]  # per layer; layers of equal kinds are interchangeable


def find_stacks(model: nn.Module, *, with_sizes: bool) -> tuple[LayerStack, ...]:
    """Return the model's outermost lists of layers in module order; lists of experts are parts of a layer.

    Layers have equal kinds if their modules have the same classes, parameters and boolean or string attributes; with
    `with_sizes`, also the same shapes, dtypes, numbers and entries in the config's lists, so that they take the same
    memory.
    """
    stacks: list[LayerStack] = []
    for name, layers in layer_lists(model, min_layers=MIN_LAYERS).items():
        kinds = [_kind(layer, with_sizes=with_sizes) for layer in layers]
        if with_sizes:
            settings = vars(getattr(_owner(model, name), "config", object)).values()
            lists = [value for value in settings if isinstance(value, list | tuple) and len(value) == len(layers)]
            kinds = [(kind, *(repr(values[index]) for values in lists)) for index, kind in enumerate(kinds)]
        stacks.append(LayerStack(name, tuple(kinds)))
    return tuple(stacks)


def layer_lists(model: nn.Module, *, min_layers: int = 1) -> dict[str, nn.ModuleList]:
    """Return the model's outermost lists of layers by name; lists inside a layer, such as experts, are part of it."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < min_layers or layer_index(name, lists) is not None:
            continue
        if len(module) and all(next(layer.parameters(), None) is not None for layer in module):
            lists[name] = module
    return lists


def output_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose outputs lead from the tokens to the head, by name, in module order.

    These are the input embeddings, every layer, and what stands next to a list of layers and has parameters, such as
    the last norm, whose output the head reads.
    """
    lists = layer_lists(model)
    owners = {name.rpartition(".")[0] for name in lists}
    find_embeddings = getattr(model, "get_input_embeddings", None)
    embeddings = find_embeddings() if callable(find_embeddings) else None
    modules = {}
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0]
        is_next_to_layers = name != owner and owner in owners and name not in lists
        if owner in lists or module is embeddings or (is_next_to_layers and any(True for _ in module.parameters())):
            modules[name] = module
    return modules


def layer_index(name: str, lists: Iterable[str]) -> int | None:
    """Return the index in its list of the layer that a module or parameter belongs to; None if it is in no list.

    >>> layer_index("encoder.block.1.layer.0.wi", ["encoder.block", "decoder.block"])
    1
    """
    prefix = next((f"{own}." for own in lists if name.startswith(f"{own}.")), None)
    return None if prefix is None else int(name.removeprefix(prefix).partition(".")[0])


def _kind(layer: nn.Module, *, with_sizes: bool) -> tuple[Hashable, ...]:
    kind = []
    for name, module in layer.named_modules():
        parameters = [
            (own, tuple(parameter.shape), parameter.dtype) if with_sizes else own
            for own, parameter in module._parameters.items()
            if parameter is not None
        ]
        switches = []
        for attribute, value in sorted(vars(module).items()):
            if attribute.startswith("_") or attribute in ("training", *_LAYER_INDICES):
                continue
            if isinstance(value, bool | str) or (with_sizes and isinstance(value, int | float)):
                switches.append((attribute, value))
            elif attribute in _WINDOWS:
                switches.append((attribute, value is not None))
        kind.append((name, type(module).__name__, tuple(parameters), tuple(switches)))
    return tuple(kind)


def shorten_config(values: MutableMapping[str, Any], layers: Sequence[int], *, lengths: set[int]) -> None:
    """Shorten a config's values to these layers, in place: counts, lists with one entry per layer, lists of indices.

    `lengths` are the current numbers of layers.
    """
    for name, value in list(values.items()):
        if name in LAYER_COUNTS and value in lengths:
            values[name] = min(value, len(layers))
        elif isinstance(value, list | tuple) and len(value) in lengths and len(value) > len(layers):
            values[name] = type(value)(value[index] for index in layers)
        elif name == _LAYER_PATTERN and isinstance(value, str):
            values[name] = "".join(value[index] for index in layers)
        elif name.endswith("_only_layers") and isinstance(value, list):
            values[name] = [layers.index(index) for index in value if index in layers]
        elif name.endswith(("_indexes", "_indices")) and isinstance(value, list):
            num_layers = max(lengths)
            values[name] = sorted({index if index < 0 else index * len(layers) // num_layers for index in value})
    if isinstance(values.get("attention_types"), list):  # GPT-Neo: a pattern and the number of its repetitions
        values["attention_types"] = [
            [pattern, max(len(layers) // len(pattern), 1)] for pattern, _ in values["attention_types"][:1]
        ]


def fewest_layers(stacks: Sequence[LayerStack]) -> KeptLayers:
    """Return the fewest layers that include every kind, in order; every stack keeps at least MIN_LAYERS."""
    kept = {}
    for stack in stacks:
        firsts = sorted(stack.kinds.index(kind) for kind in set(stack.kinds))
        others = [index for index in range(len(stack.kinds)) if index not in firsts]
        kept[stack.name] = sorted([*firsts, *others[: max(0, MIN_LAYERS - len(firsts))]])
    return kept


def with_one_more(stacks: Sequence[LayerStack], layers_of: KeptLayers) -> Iterator[tuple[int, KeptLayers]]:
    """Yield, for every kind with omitted layers, their number and the kept layers plus one of them."""
    for stack in stacks:
        own = layers_of[stack.name]
        num_kept = Counter(stack.kinds[index] for index in own)
        for kind, number in Counter(stack.kinds).items():
            if number > num_kept[kind]:
                more = next(index for index, other in enumerate(stack.kinds) if other == kind and index not in own)
                yield number - num_kept[kind], {**layers_of, stack.name: sorted([*own, more])}


def with_layers(model: Any, layers_of: KeptLayers) -> Any:
    """Return a copy of the model with these layers only, like a smaller model of its type."""
    whole = {name: model.get_submodule(name) for name in layers_of}
    for name, indices in layers_of.items():
        _set(model, name, nn.ModuleList([whole[name][index] for index in indices]))
    try:
        small = copy.deepcopy(model)
    finally:
        for name, layers in whole.items():
            _set(model, name, layers)
    shortened: set[int] = set()
    for name, indices in layers_of.items():
        for new, (old, layer) in enumerate(zip(indices, small.get_submodule(name).children(), strict=True)):
            for module in layer.modules():
                for attribute in _LAYER_INDICES:
                    if vars(module).get(attribute) == old:
                        setattr(module, attribute, new)
        config = getattr(_owner(small, name), "config", None)
        if config is not None and id(config) not in shortened:
            shortened.add(id(config))
            shorten_config(vars(config), indices, lengths={len(whole[name])})
    return small


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _set(model: nn.Module, name: str, layers: nn.Module) -> None:
    setattr(_owner(model, name), name.rpartition(".")[2], layers)


FREEZE_KEY, TRAIN_ONLY_KEY = "model.freeze", "model.train_only"


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the matching parameters, or all without patterns; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matching = {
        name for pattern in patterns for name in matched_parameters(pattern, list(parameters), key=TRAIN_ONLY_KEY)
    }
    trained = {parameters[name] for name in matching}
    for parameter in parameters.values() if patterns else ():
        parameter.requires_grad_(parameter in trained)


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the matching parameters and return their names; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing, and when no parameter would be trained.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen: list[str] = []
    for pattern in patterns:
        frozen.extend(matched_parameters(pattern, list(parameters), key=FREEZE_KEY))
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{FREEZE_KEY}: every parameter is frozen, so nothing would be trained. Remove some patterns.")
    return tuple(dict.fromkeys(frozen))


def matched_parameters(pattern: str, names: list[str], *, key: str) -> list[str]:
    """Return the names that match; raises ModelError if there are none."""
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        similar = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
        examples = ", ".join(f"`{name}`" for name in similar)
        raise ModelError(f"{key}: no parameter matches `{pattern}`. Examples of parameter names: {examples}.")
    return matched


FEATURE_LAYER_KEY = "vision_feature_layer"
"""Config key of LLaVA and similar models for the image encoder's layer whose output is used; later ones are unused."""

_VISION_TOWER = "vision_tower"
_MODULES_AFTER_LAYERS = ("post_layernorm", "layernorm", "head")


POOLER = "pooler"
"""BERT's layer over the first token, which only some heads read."""


def unused_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules whose output is unused; usually none.

    These are the layers of an image encoder after the last used one, and the pooler of a model without a head, which
    only the hidden states are used.
    """
    has_head = getattr(model, "base_model", None) is not model
    if not has_head and isinstance(getattr(model, POOLER, None), nn.Module):
        return (POOLER,)
    read = getattr(getattr(model, "config", None), FEATURE_LAYER_KEY, None)
    if read is None:
        return ()
    unused: list[str] = []
    for name, tower in model.named_modules():
        stacks = {path: module for path, module in tower.named_modules() if isinstance(module, nn.ModuleList)}
        if name.rpartition(".")[2] != _VISION_TOWER or not stacks:
            continue
        longest = max(stacks, key=lambda path: len(stacks[path]))
        num_layers = len(stacks[longest])
        indices = [read] if isinstance(read, int) else list(read)
        num_read = max(index if index >= 0 else num_layers + 1 + index for index in indices)
        unused += [f"{name}.{longest}.{number}" for number in range(num_read, num_layers)]
        paths = [path for path, _ in tower.named_modules() if path.rpartition(".")[2] in _MODULES_AFTER_LAYERS]
        unused += [f"{name}.{path}" for path in paths]
    return tuple(unused)


def peft_exclude_pattern(model: nn.Module) -> str | None:
    """Return peft's pattern for unused modules, which get no adapter; None without unused modules."""
    names = unused_modules(model)
    return "|".join(rf"{re.escape(name)}(\..*)?" for name in names) or None
