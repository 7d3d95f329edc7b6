"""Parameters grouped by weight decay, learning-rate factor (also by depth) and the step that unfreezes them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from finetune.config.sections.train import OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.runtime.parameters import full_numel, full_shape

_LAYER = re.compile(
    r"^(?P<stack>(?:.*?\.)??)(?:stages\.(?P<stage>\d+)\.)?(?:layers|layer|h|blocks|block)\.(?P<number>\d+)\."
)
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|shared)(?:\.|$)")


@dataclass(frozen=True)
class LayerPosition:
    """A layer of a stack: `stack` is the name before its number, `number` counts from the bottom."""

    stack: str
    number: tuple[int, int]  # stage (0 where there are none) and layer


def layer_of(name: str) -> LayerPosition | None:
    """Return the layer in which the parameter lies; None for embeddings, heads and everything between.

    The first of `layers.N.`, `layer.N.`, `h.N.`, `blocks.N.` and `block.N.` counts, after `stages.N.` where the model
    has stages.
    """
    found = _LAYER.match(name)
    return None if found is None else LayerPosition(found["stack"], (int(found["stage"] or 0), int(found["number"])))


def is_embedding(name: str) -> bool:
    """Return whether the parameter turns what is read into vectors."""
    return layer_of(name) is None and _EMBEDDING.search(name) is not None


def layer_depths(aliases: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return by name how many layers a parameter lies below the head.

    Heads and norms after the last layer are at 0, the last layer of each stack (encoder and decoder alike) at 1, and
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


RATE_FACTOR, UNFREEZE_AFTER = "rate_factor", "begins_after"
"""Keys of a group besides torch's own; Accelerate, FSDP and DeepSpeed keep them."""

MAX_DESCRIBED_GROUPS = 12
"""Groups that are listed: a deep model with layer decay has dozens."""

_LORA_B = re.compile(r"\.lora_(?:embedding_)?B\.")


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under the first of its names; `aliases` are all of them (an embedding that is also the head)."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    is_embedding: bool = False  # of an `nn.Embedding`

    def matches(self, pattern: str) -> bool:
        """Return whether the pattern matches one of its names."""
        return any(fnmatchcase(alias, pattern) for alias in self.aliases)


def list_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return each parameter of the model once, in its order, frozen ones too."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    embeddings = {
        parameter for module in model.modules() if isinstance(module, nn.Embedding) for parameter in module.parameters()
    }
    return [
        NamedParameter(found[0], tuple(found), each, is_embedding=each in embeddings) for each, found in names.items()
    ]


def parameter_groups(
    named: Sequence[NamedParameter], section: OptimizerSection, unfreeze: Sequence[UnfreezeSection] = ()
) -> list[dict[str, Any]]:
    """Return the trained parameters as groups for an optimizer, parameters with equal settings in one; none is empty.

    Matrices decay, biases, norms and other vectors do not. Raises ModelError for a pattern that matches no trained
    parameter, for layer decay without numbered layers, and where nothing would be trained at first.
    """
    trained = [each for each in named if each.parameter.requires_grad]
    factors = rate_factors(named, section)
    begins = _unfreeze_steps(trained, unfreeze)
    groups: dict[tuple[float, float, int], dict[str, Any]] = {}
    for each in trained:
        decay = section.weight_decay if len(full_shape(each.parameter)) >= 2 else 0.0
        key = (decay, factors[each.name], begins.get(each.name, 0))
        group = groups.setdefault(
            key, {"params": [], "weight_decay": decay, RATE_FACTOR: key[1], UNFREEZE_AFTER: key[2]}
        )
        group["params"].append(each.parameter)
    if trained and all(group[UNFREEZE_AFTER] for group in groups.values()):
        raise ModelError(
            "train.unfreeze: the patterns match every parameter, so nothing would be trained at first. Leave some out."
        )
    return list(groups.values())


def rate_factors(named: Sequence[NamedParameter], section: OptimizerSection) -> dict[str, float]:
    """Return by name what each trained parameter's learning rate is multiplied by.

    It is the product of the layer's decay (Howard & Ruder, 2018, arXiv:1801.06146), the first of `rates` that fits and
    the ratio of LoRA+ (Hayou et al., 2024, arXiv:2402.12354).
    """
    trained = [each for each in named if each.parameter.requires_grad]
    below = _depths(named) if section.layer_decay != 1.0 else {}
    for pattern in section.rates:
        _require_match(pattern, trained, key="train.optimizer.rates")
    return {
        each.name: section.layer_decay ** below.get(each.name, 0)
        * next((rate for pattern, rate in section.rates.items() if each.matches(pattern)), 1.0)
        * (section.lora_plus_ratio if _LORA_B.search(each.name) else 1.0)
        for each in trained
    }


def describe_groups(groups: Sequence[Mapping[str, Any]], named: Sequence[NamedParameter]) -> Iterator[str]:
    """Yield a line for each of the first groups; nothing where all are trained at one rate from the start."""
    if all(group[RATE_FACTOR] == 1.0 and not group[UNFREEZE_AFTER] for group in groups):
        return
    names = {id(each.parameter): each.name for each in named}
    groups = _merge_alike(groups)
    yield "parameter groups:"
    for group in groups[:MAX_DESCRIBED_GROUPS]:
        count, first = len(group["params"]), names[id(group["params"][0])]
        size = sum(map(full_numel, group["params"]))
        begins = f", from step {group[UNFREEZE_AFTER] + 1}" if group[UNFREEZE_AFTER] else ""
        yield (
            f"  rate x {group[RATE_FACTOR]:<8.4g} decay {group['weight_decay']:g}{begins}: {size:,} parameters in "
            f"{count} tensor{'s' * (count > 1)}, such as {first}"
        )
    if len(groups) > MAX_DESCRIBED_GROUPS:
        yield f"  and {len(groups) - MAX_DESCRIBED_GROUPS} more"
    if any(group[UNFREEZE_AFTER] for group in groups):
        yield (
            "  until they begin, parameters keep their values and have no part in gradient norm or optimizer state; "
            "their gradients are computed all the same"
        )


def _merge_alike(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the groups, those with equal settings merged: an optimizer may split groups for its own reasons."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        key = (group[RATE_FACTOR], group["weight_decay"], group[UNFREEZE_AFTER])
        found.setdefault(key, {**group, "params": []})["params"].extend(group["params"])
    return list(found.values())


def _depths(named: Sequence[NamedParameter]) -> dict[str, int]:
    found = layer_depths({each.name: each.aliases for each in named})
    if not found:
        raise ModelError(
            "train.optimizer.layer_decay: no parameter's name has the number of a layer (`layers.0.`, `h.0.`, "
            f"`layer.0.`, `blocks.0.`). {_examples([each.name for each in named])} Write train.optimizer.rates instead."
        )
    return found


def _unfreeze_steps(trained: Sequence[NamedParameter], unfreeze: Sequence[UnfreezeSection]) -> dict[str, int]:
    """Return by name the steps after which a parameter is unfrozen; the first section that matches counts."""
    for section in unfreeze:
        for pattern in section.patterns:
            _require_match(pattern, trained, key="train.unfreeze")
    found: dict[str, int] = {}
    for section in unfreeze:
        for each in trained:
            if any(map(each.matches, section.patterns)):
                found.setdefault(each.name, section.after_steps)
    return found


def _require_match(pattern: str, trained: Sequence[NamedParameter], *, key: str) -> None:
    if not any(each.matches(pattern) for each in trained):
        names = [alias for each in trained for alias in each.aliases]
        near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
        raise ModelError(f"{key}: no trained parameter matches `{pattern}`. {_examples(near or names)}")


def _examples(names: Sequence[str]) -> str:
    return f"Parameters are called, for example, {', '.join(f'`{name}`' for name in names[:3])}."
