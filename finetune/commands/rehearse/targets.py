"""Matches names in the job (adapters, frozen and trained parameters, layers) with the real model.

The small model has fewer layers. Each of them represents a real one, and a pattern that selects layers is replaced by
the names of the layers that represent its matches.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from finetune.commands.rehearse.report import Change
from finetune.commands.rehearse.small_model import Architecture
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.errors import ModelError
from finetune.model.adapters.context import check_module_names
from finetune.model.freeze import freeze, matched_parameters, train_only
from finetune.model.layers import LayerStack

_WHY = "mapped to the layers of the small model"

Matches = Callable[[str, str], bool]
"""Whether a name matches a pattern."""


def match_targets(config: RunConfig, architecture: Architecture) -> list[Change]:
    """Return a change for each key of the job whose names are others in the small model."""
    names = _Names(architecture)
    changes = []
    for key, written, matches in _patterns(config):
        if isinstance(written, Mapping):
            was: Any = dict(written)
            now: Any = {name: value for pattern, value in was.items() for name in names.for_small([pattern], matches)}
        else:
            was, now = list(written), names.for_small(written, matches)
        if list(now) != list(was):
            changes.append(Change(key, was, now, _WHY))
    layers = config.model.lora.layers if config.model.lora is not None else ()
    small_layers = names.small_layers(layers)
    if small_layers != list(layers):
        changes.append(Change("model.lora.layers", list(layers), small_layers, _WHY))
    return changes


def check_targets(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield a line for each match of the job's names in the real model; raises ModelError."""
    real, section = architecture.real, config.model
    modules = [name for name, _ in real.named_modules()]
    for key, targets, _ in _module_patterns(config):
        if targets:
            check_module_names(real, tuple(targets), key=key)
            number = sum(_is_module(name, target) for name in modules for target in targets)
            yield f"{key}: {number} modules of the real model"
    if section.lora is not None:
        if section.lora.modules_to_save:
            check_module_names(real, section.lora.modules_to_save, key="model.lora.modules_to_save")
        num_layers = max((len(stack.kinds) for stack in architecture.real_stacks), default=0)
        beyond = [layer for layer in section.lora.layers if layer >= num_layers]
        if beyond:
            raise ModelError(
                f"model.lora.layers: layer {beyond[0]} does not exist in the real model, which has {num_layers} "
                "layers, counted from 0."
            )
    parameters = [name for name, _ in real.named_parameters(remove_duplicate=False)]
    for key, patterns, _ in _parameter_patterns(config):
        for pattern in patterns:
            matched_parameters(pattern, parameters, key=key)
    freeze(real, section.freeze)
    train_only(real, section.train_only)
    if section.freeze or section.train_only:
        trained = sum(parameter.requires_grad for parameter in real.parameters())
        key = "model.freeze" if section.freeze else "model.train_only"
        yield f"{key}: {trained} parameters of the real model are trained"


_Pattern = tuple[str, Sequence[str] | Mapping[str, Any], Matches]
"""Key, patterns, and how they match names."""


def _patterns(config: RunConfig) -> Iterator[_Pattern]:
    yield from _parameter_patterns(config)
    yield from _module_patterns(config)
    if config.model.lora is not None:
        yield "model.lora.rank_pattern", config.model.lora.rank_pattern, _ends_with
        yield "model.lora.alpha_pattern", config.model.lora.alpha_pattern, _ends_with


def _parameter_patterns(config: RunConfig) -> Iterator[_Pattern]:
    yield "model.freeze", config.model.freeze, fnmatchcase
    yield "model.train_only", config.model.train_only, fnmatchcase
    for index, unfreezing in enumerate(config.train.unfreeze):
        yield f"train.unfreeze.{index}.patterns", unfreezing.patterns, fnmatchcase
    if adapter_of(config) is None:
        yield "train.optimizer.rates", config.train.optimizer.rates, fnmatchcase


def _module_patterns(config: RunConfig) -> Iterator[_Pattern]:
    for key, adapter in (("lora", config.model.lora), ("ia3", config.model.ia3), ("oft", config.model.oft)):
        targets = getattr(adapter, "target_modules", ())
        if isinstance(targets, tuple):
            yield f"model.{key}.target_modules", targets, _is_module


def _is_module(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends_with(name: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


class _Names:
    """The names in both models, and which layer of the real one a layer of the small one stands for."""

    def __init__(self, architecture: Architecture) -> None:
        models = (architecture.real, architecture.small)
        self._parameters = [[name for name, _ in model.named_parameters(remove_duplicate=False)] for model in models]
        self._modules = [[name for name, _ in model.named_modules()] for model in models]
        small = {stack.name: stack for stack in architecture.small_stacks}
        self._stacks = [(stack, small[stack.name]) for stack in architecture.real_stacks if stack.name in small]

    def for_small(self, patterns: Iterable[str], matches: Matches) -> list[str]:
        """Return the names for the small model; a pattern with the same matches there is kept."""
        real, small = self._parameters if matches is fnmatchcase else self._modules
        names: list[str] = []
        for pattern in patterns:
            selected = {name for name in small if matches(self._renamed(name, to_real=True), pattern)}
            direct = {name for name in small if matches(name, pattern)}
            if not selected:  # its layers were removed: use those that represent them
                selected = {self._renamed(name, to_real=False) for name in real if matches(name, pattern)} & set(small)
            names += [name for name in small if name in selected] if selected and selected != direct else [pattern]
        return list(dict.fromkeys(names))

    def small_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the layers of the small model that represent these."""
        if not self._stacks or not layers:
            return list(layers)
        real, small = max(self._stacks, key=lambda stacks: len(stacks[0].kinds))
        kept = [index for index in range(len(small.kinds)) if real_layer(index, real=real, small=small) in layers]
        return kept or sorted({small_layer(index, real=real, small=small) for index in layers})

    def _renamed(self, name: str, *, to_real: bool) -> str:
        """Return the name with the index of the corresponding real or small layer."""
        for real, small in self._stacks:
            index, dot, rest = name.removeprefix(f"{real.name}.").partition(".")
            if name.startswith(f"{real.name}.") and index.isdigit():
                stands_for = real_layer if to_real else small_layer
                return f"{real.name}.{stands_for(int(index), real=real, small=small)}{dot}{rest}"
        return name


def real_layer(index: int, *, real: LayerStack, small: LayerStack) -> int:
    """Return the real layer that a small one represents: of the same type, at the same relative depth."""
    depth = index * (len(real.kinds) - 1) / max(len(small.kinds) - 1, 1)
    return _nearest(depth, small.kinds[index], real)


def small_layer(index: int, *, real: LayerStack, small: LayerStack) -> int:
    """Return the small layer that represents a real one: of the same type, at the same relative depth."""
    return _nearest(int(index * len(small.kinds) / len(real.kinds)), real.kinds[index], small)


def _nearest(depth: float, kind: Any, stack: LayerStack) -> int:
    same = [index for index, own in enumerate(stack.kinds) if own == kind] or range(len(stack.kinds))
    return min(same, key=lambda index: abs(index - depth))
