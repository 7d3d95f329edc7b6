"""What the job says by name - adapters, frozen and trained parameters, layers - matched with the real model.

The small model has fewer layers. Each of its layers stands for one of the real ones, and a pattern that singles out
layers is replaced by the names of those that stand for what it matches.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from finetune.commands.rehearse.architecture import Architecture
from finetune.commands.rehearse.layers import Stack, map_index
from finetune.commands.rehearse.shrink import Change
from finetune.config.run_config import RunConfig
from finetune.errors import ModelError
from finetune.model.adapters.context import check_module_names
from finetune.model.freeze import freeze, train_only

_WHY = "layers of the real model, as the small one has them"


@dataclass(frozen=True)
class ShrinkTargets:
    """Overrides for the small model, what they change, and what was matched with the real one."""

    overrides: Mapping[str, Any]
    changes: tuple[Change, ...]
    matched: tuple[str, ...]


def match_targets(config: RunConfig, architecture: Architecture) -> ShrinkTargets:
    """Return how the job's names are written for the small model; raises ModelError for one that matches nothing."""
    names = _Names(architecture)
    matched = list(_check_real(config, architecture))
    changes: list[Change] = []
    overrides: dict[str, Any] = {}
    for key, written, matches, real, small in _written_names(config, names):
        mapped = names.mapped(written, matches, real=real, small=small)
        if mapped != list(written):
            now: Any = mapped
            if isinstance(written, Mapping):
                now = {
                    one: value
                    for name, value in written.items()
                    for one in names.mapped([name], matches, real=real, small=small)
                }
            overrides[key] = now
            changes.append(Change(key, _shown(written), _shown(now), _WHY))
    if config.model.lora is not None and config.model.lora.layers:
        layers = names.mapped_layers(config.model.lora.layers)
        if layers != list(config.model.lora.layers):
            overrides["model.lora.layers"] = layers
            changes.append(Change("model.lora.layers", list(config.model.lora.layers), layers, _WHY))
    return ShrinkTargets(overrides, tuple(changes), tuple(matched))


def _shown(names: Iterable[str]) -> str:
    each = list(names)
    return ", ".join(each) if len(each) <= 3 else f"{', '.join(each[:2])}, ... ({len(each)} names)"


def _check_real(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield what the job's names match in the real model; raises ModelError."""
    real, section = architecture.real, config.model
    for key, adapter in (("lora", section.lora), ("ia3", section.ia3), ("oft", section.oft)):
        targets = getattr(adapter, "target_modules", ())
        if isinstance(targets, tuple) and targets:
            check_module_names(real, targets, key=f"model.{key}.target_modules")
            number = sum(_is_module(name, each) for name, _ in real.named_modules() for each in targets)
            yield f"model.{key}.target_modules: {number} modules of the real model"
    if section.lora is not None:
        if section.lora.modules_to_save:
            check_module_names(real, section.lora.modules_to_save, key="model.lora.modules_to_save")
        _check_layers(section.lora.layers, architecture.real_stacks)
    names = [name for name, _ in real.named_parameters(remove_duplicate=False)]
    for key, patterns in _parameter_patterns(config):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ModelError(f"{key}: no parameter of the real model matches `{pattern}`. Examples: {names[:3]}.")
    freeze(real, section.freeze)
    train_only(real, section.train_only)
    if section.freeze or section.train_only:
        trained = sum(each.requires_grad for each in real.parameters())
        key = "model.freeze" if section.freeze else "model.train_only"
        yield f"{key}: {trained} parameters of the real model are trained"


def _check_layers(layers: Sequence[int], stacks: Sequence[Stack]) -> None:
    most = max((len(each.kinds) for each in stacks), default=0)
    beyond = [each for each in layers if each >= most]
    if beyond:
        raise ModelError(
            f"model.lora.layers: there is no layer {beyond[0]} in the real model, which has {most}. Layers are counted "
            "from 0."
        )


def _is_module(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends_with(name: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _parameter_patterns(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "model.freeze", config.model.freeze
    yield "model.train_only", config.model.train_only
    for index, each in enumerate(config.train.unfreeze):
        yield f"train.unfreeze.{index}.patterns", each.patterns
    if not _has_adapter(config):
        yield "train.optimizer.rates", tuple(config.train.optimizer.rates)


def _has_adapter(config: RunConfig) -> bool:
    section = config.model
    return any((section.lora, section.ia3, section.oft, section.prompt_tuning, section.prefix_tuning, section.adapter))


_Written = Sequence[str] | Mapping[str, Any]


def _written_names(
    config: RunConfig, names: "_Names"
) -> Iterator[tuple[str, _Written, Callable[[str, str], bool], Sequence[str], Sequence[str]]]:
    """Yield key, names, how they match, and the names in the real and in the small model."""
    parameters = names.real_parameters, names.small_parameters
    modules = names.real_modules, names.small_modules
    for key, patterns in _parameter_patterns(config):
        written: _Written = config.train.optimizer.rates if key.endswith("rates") else patterns
        yield key, written, fnmatchcase, *parameters
    for key, adapter in (("lora", config.model.lora), ("ia3", config.model.ia3), ("oft", config.model.oft)):
        targets = getattr(adapter, "target_modules", ())
        if isinstance(targets, tuple):
            yield f"model.{key}.target_modules", targets, _is_module, *modules
    if config.model.lora is not None:
        yield "model.lora.rank_pattern", config.model.lora.rank_pattern, _ends_with, *modules
        yield "model.lora.alpha_pattern", config.model.lora.alpha_pattern, _ends_with, *modules


class _Names:
    """The names in both models, and which layer of the real one a layer of the small one stands for."""

    def __init__(self, architecture: Architecture) -> None:
        self.real_parameters = [name for name, _ in architecture.real.named_parameters(remove_duplicate=False)]
        self.real_modules = [name for name, _ in architecture.real.named_modules()]
        self.small_parameters = list(architecture.small_names)
        self.small_modules = list(architecture.small_modules)
        small = {each.name: each for each in architecture.small_stacks}
        self._stacks = [(each, small[each.name]) for each in architecture.real_stacks if each.name in small]

    def mapped(
        self, written: Iterable[str], matches: Callable[[str, str], bool], *, real: Sequence[str], small: Sequence[str]
    ) -> list[str]:
        """Return the names for the small model: as they are written where they say the same there."""
        found: list[str] = []
        for pattern in written:
            wanted = {name for name in small if matches(self._real_name(name), pattern)}
            direct = {name for name in small if matches(name, pattern)}
            if not wanted:  # what it matches is between the layers that are kept
                wanted = {self._small_name(name) for name in real if matches(name, pattern)} & set(small)
            found += [pattern] if wanted == direct or not wanted else [name for name in small if name in wanted]
        return list(dict.fromkeys(found))

    def mapped_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the layers of the small model that stand for these."""
        if not self._stacks:
            return list(layers)
        one, other = max(self._stacks, key=lambda both: len(both[0].kinds))
        kept = [index for index in range(len(other.kinds)) if _stands_for(index, one, other) in layers]
        return kept or sorted({map_index(each, real=one.kinds, small=other.kinds) for each in layers})

    def _real_name(self, name: str) -> str:
        for one, other in self._stacks:
            index = _index_in(name, other)
            if index is not None:
                return name.replace(f"{other.name}.{index}", f"{one.name}.{_stands_for(index, one, other)}", 1)
        return name

    def _small_name(self, name: str) -> str:
        for one, other in self._stacks:
            index = _index_in(name, one)
            if index is not None:
                small = map_index(index, real=one.kinds, small=other.kinds)
                return name.replace(f"{one.name}.{index}", f"{other.name}.{small}", 1)
        return name


def _index_in(name: str, stack: Stack) -> int | None:
    rest = name.removeprefix(f"{stack.name}.")
    number = rest.partition(".")[0]
    return int(number) if rest != name and number.isdigit() else None


def _stands_for(index: int, real: Stack, small: Stack) -> int:
    """Return the layer of the real model that one of the small model stands for: first for first, last for last."""
    wanted = index * (len(real.kinds) - 1) / max(len(small.kinds) - 1, 1)
    same = [place for place, kind in enumerate(real.kinds) if kind == small.kinds[index]] or range(len(real.kinds))
    return min(same, key=lambda place: abs(place - wanted))
