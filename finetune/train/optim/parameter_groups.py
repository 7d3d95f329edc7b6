"""Parameter groups by weight decay, learning-rate factor (including layer-wise decay) and unfreezing step."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from finetune.config.sections.train import OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.runtime.parameters import full_numel, full_shape

_LAYER = re.compile(
    r"^(?P<stack>(?:.*?\.)??)(?:stages\.(?P<stage>\d+)\.)?(?:layers|layer|h|blocks|block)\.(?P<number>\d+)\."
)
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|shared)(?:\.|$)")


@dataclass(frozen=True)
class LayerPosition:
    """A numbered layer: `stack` is the name prefix before its number, `number` counts from the bottom."""

    stack: str
    number: tuple[int, int]  # stage (0 where there are none) and layer


def layer_of(name: str) -> LayerPosition | None:
    """Return the layer of a parameter; None for embeddings, heads and other parameters outside numbered layers.

    The layer is the first match of `layers.N.`, `layer.N.`, `h.N.`, `blocks.N.` or `block.N.`, after `stages.N.` where
    the model has stages.
    """
    match = _LAYER.match(name)
    return None if match is None else LayerPosition(match["stack"], (int(match["stage"] or 0), int(match["number"])))


def is_embedding(name: str) -> bool:
    """Return whether the name is that of an input embedding's parameter."""
    return layer_of(name) is None and _EMBEDDING.search(name) is not None


def layer_depths(aliases: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the depth of each parameter, by name: its number of layers below the head.

    Heads and norms after the last layer have depth 0, the last layer of each stack (encoder and decoder) has depth 1,
    and embeddings are one below the first layer of the longest stack. `aliases` maps a parameter's name to all its
    names: an embedding tied to the head counts as an embedding. Empty if no name contains a layer number.
    """
    positions = {name: layer_of(name) for name in aliases}
    stacks: dict[str, set[tuple[int, int]]] = {}
    for position in positions.values():
        if position is not None:
            stacks.setdefault(position.stack, set()).add(position.number)
    if not stacks:
        return {}
    from_bottom = {stack: sorted(numbers) for stack, numbers in stacks.items()}
    embedding_depth = max(map(len, stacks.values())) + 1
    depths: dict[str, int] = {}
    for name, position in positions.items():
        if position is not None:
            numbers = from_bottom[position.stack]
            depths[name] = len(numbers) - numbers.index(position.number)
        else:
            depths[name] = embedding_depth if any(map(is_embedding, aliases[name])) else 0
    return depths


RATE_FACTOR, UNFREEZE_AFTER = "rate_factor", "begins_after"
"""Keys of a parameter group in addition to torch's; Accelerate, FSDP and DeepSpeed preserve them."""

MAX_DESCRIBED_GROUPS = 12
"""Maximum number of groups to list: a deep model with layer decay has dozens."""

_LORA_B = re.compile(r"\.lora_(?:embedding_)?B\.")


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and its first name; `aliases` are all its names (an embedding tied to the head has two)."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    is_embedding: bool = False  # belongs to an `nn.Embedding`
    is_vector: bool = False  # a bias, norm, scale or vector of channels, also if it is stored as a matrix

    def matches(self, pattern: str) -> bool:
        """Return whether the pattern matches one of the parameter's names."""
        return any(fnmatchcase(alias, pattern) for alias in self.aliases)


def list_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return every parameter of the model once, in the model's order, including frozen parameters."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        NamedParameter(
            aliases[0],
            tuple(aliases),
            parameter,
            is_embedding=any(isinstance(modules[name.rpartition(".")[0]], nn.Embedding) for name in aliases),
            is_vector=_is_vector(aliases[0], modules[aliases[0].rpartition(".")[0]], full_shape(parameter)),
        )
        for parameter, aliases in names.items()
    ]


_VECTOR = re.compile(r"bias|norm|(?:^|_)(?:scales?|gamma|alpha|lambda|ia3_l|boft_s|A_log)(?:_|$)|^D$")
"""Names of biases, norms and scales: of parameters, or of modules whose `weight` they are."""


def _is_vector(name: str, module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether this is a bias, norm, scale or vector of channels, of one layer or stacked for experts or heads.

    A matrix with one row (a head with one output, a factor of rank 1, one new token) is none.
    """
    owner, _, own = name.rpartition(".")
    is_entry = isinstance(module, nn.ParameterDict)  # of peft, by the adapter's name
    kind = owner.rpartition(".")[2] if is_entry or own == "weight" else own
    if len(shape) < 2:
        return True
    if own == "weight" and isinstance(module, nn.Linear | nn.Embedding | _ConvNd):
        return "bias" in kind  # a table of relative positions
    if _VECTOR.search(kind) or "Norm" in type(module).__name__:
        return True
    may_have_one_row = is_entry or (own == "weight" and len(shape) == 2)
    return not may_have_one_row and sum(size > 1 for size in shape) <= 1


def parameter_groups(
    named_parameters: Sequence[NamedParameter], section: OptimizerSection, unfreeze: Sequence[UnfreezeSection] = ()
) -> list[dict[str, Any]]:
    """Return the trained parameters as optimizer groups, one non-empty group per combination of settings.

    Weight decay applies to matrices, not to biases, norms and other vectors, however they are stored. Raises ModelError
    if a pattern matches no trained parameter, if layer decay is set without numbered layers, or if no parameter would
    be trained at the start.
    """
    trained = [entry for entry in named_parameters if entry.parameter.requires_grad]
    factors = rate_factors(named_parameters, section)
    unfreeze_steps: dict[str, int] = {}  # the first matching section wins
    for part in unfreeze:
        for pattern in part.patterns:
            _require_match(pattern, trained, key="train.unfreeze")
        for entry in trained:
            if any(map(entry.matches, part.patterns)):
                unfreeze_steps.setdefault(entry.name, part.after_steps)
    groups: dict[tuple[float, float, int, bool], dict[str, Any]] = {}
    for entry in trained:
        decay = 0.0 if entry.is_vector else section.weight_decay
        is_split = isinstance(entry.parameter, DTensor)  # torch updates no mixture of both in one kernel
        key = (decay, factors[entry.name], unfreeze_steps.get(entry.name, 0), is_split)
        group = groups.setdefault(
            key, {"params": [], "weight_decay": decay, RATE_FACTOR: key[1], UNFREEZE_AFTER: key[2]}
        )
        group["params"].append(entry.parameter)
    if trained and all(group[UNFREEZE_AFTER] for group in groups.values()):
        raise ModelError(
            "train.unfreeze: the patterns match every parameter, so nothing would be trained at the start. "
            "Remove some patterns."
        )
    return list(groups.values())


def rate_factors(named_parameters: Sequence[NamedParameter], section: OptimizerSection) -> dict[str, float]:
    """Return the learning-rate factor of every trained parameter, by name.

    The factor is the product of the layer-wise decay (Howard & Ruder, 2018, arXiv:1801.06146), the first matching entry
    of `rates` and the LoRA+ ratio (Hayou et al., 2024, arXiv:2402.12354).
    """
    trained = [entry for entry in named_parameters if entry.parameter.requires_grad]
    depths: dict[str, int] = {}
    if section.layer_decay != 1.0:
        depths = layer_depths({entry.name: entry.aliases for entry in named_parameters})
        if not depths:
            examples = _examples([entry.name for entry in named_parameters])
            raise ModelError(
                "train.optimizer.layer_decay: no parameter name contains a layer number (`layers.0.`, `h.0.`, "
                f"`layer.0.`, `blocks.0.`). {examples} Use train.optimizer.rates instead."
            )
    for pattern in section.rates:
        _require_match(pattern, trained, key="train.optimizer.rates")
    return {
        entry.name: section.layer_decay ** depths.get(entry.name, 0)
        * next((rate for pattern, rate in section.rates.items() if entry.matches(pattern)), 1.0)
        * (section.lora_plus_ratio if _LORA_B.search(entry.name) else 1.0)
        for entry in trained
    }


def describe_groups(groups: Sequence[Mapping[str, Any]], named_parameters: Sequence[NamedParameter]) -> Iterator[str]:
    """Yield a line per group, up to MAX_DESCRIBED_GROUPS; nothing if all are trained at one rate from the start."""
    if all(group[RATE_FACTOR] == 1.0 and not group[UNFREEZE_AFTER] for group in groups):
        return
    names = {id(entry.parameter): entry.name for entry in named_parameters}
    # Groups with equal settings are merged: some optimizers split groups internally.
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for alike in groups:
        key = (alike[RATE_FACTOR], alike["weight_decay"], alike[UNFREEZE_AFTER])
        merged.setdefault(key, {**alike, "params": []})["params"].extend(alike["params"])
    groups = list(merged.values())
    yield "parameter groups:"
    for group in groups[:MAX_DESCRIBED_GROUPS]:
        count, first = len(group["params"]), names[id(group["params"][0])]
        size = sum(map(full_numel, group["params"]))
        start = f", from step {group[UNFREEZE_AFTER] + 1}" if group[UNFREEZE_AFTER] else ""
        yield (
            f"  rate x {group[RATE_FACTOR]:<8.4g} decay {group['weight_decay']:g}{start}: {size:,} parameters in "
            f"{count} tensor{'s' * (count > 1)}, such as {first}"
        )
    if len(groups) > MAX_DESCRIBED_GROUPS:
        yield f"  and {len(groups) - MAX_DESCRIBED_GROUPS} more"
    if any(group[UNFREEZE_AFTER] for group in groups):
        yield (
            "  frozen parameters keep their values and are excluded from the gradient norm and the optimizer state; "
            "their gradients are computed nevertheless"
        )


def group_settings(groups: Sequence[Mapping[str, Any]], named: Sequence[NamedParameter]) -> dict[str, str]:
    """Return, for every name with `*` for the numbers in it, how many tensors are trained with which settings."""
    names = {id(entry.parameter): _NUMBER.sub(".*.", entry.name) for entry in named}
    counts: dict[str, Counter[str]] = {}
    for group in groups:
        settings = ", ".join(f"{name} {group[name]}" for name in _COMPARED if name in group)
        for parameter in group["params"]:
            counts.setdefault(names.get(id(parameter), "others"), Counter())[settings] += 1
    return {
        name: "; ".join(f"{count} with {settings}" for settings, count in sorted(of_name.items()))
        for name, of_name in counts.items()
    }


_COMPARED = ("weight_decay", RATE_FACTOR, UNFREEZE_AFTER, "betas", "eps", "momentum")
_NUMBER = re.compile(r"\.\d+\.")


def _require_match(pattern: str, trained: Sequence[NamedParameter], *, key: str) -> None:
    if not any(entry.matches(pattern) for entry in trained):
        names = [alias for entry in trained for alias in entry.aliases]
        near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
        raise ModelError(f"{key}: no trained parameter matches `{pattern}`. {_examples(near or names)}")


def _examples(names: Sequence[str]) -> str:
    return f"Parameter names are, for example, {', '.join(f'`{name}`' for name in names[:3])}."
