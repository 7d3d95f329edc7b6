"""The real architecture on the meta device, and a small one with the same kinds of layers, ties and switches."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.commands.rehearse.layers import Stack, find_stacks, is_count, kept_layers
from finetune.commands.rehearse.shrink import LAYERS, Change, Sizes, Values, changed_values, shrunk_values
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import HEADS, load_model_config
from finetune.model.loading.config_names import known_names
from finetune.model.loading.dry_run import forward_error, meta_model
from finetune.model.loading.pretrained import build_from_config

SMALL_PARAMETERS = 3_000_000
"""A model with fewer is rehearsed as it is."""

MAX_PARAMETERS = 300_000_000
"""A model that cannot be made smaller than that is refused: a few steps of it would take too long on a CPU."""

_IGNORED = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")


@dataclass(frozen=True)
class Architecture:
    """The real model without values and the config of the small one, with what differs."""

    real: PreTrainedModel  # on the meta device
    config: PreTrainedConfig  # of the small one
    changes: tuple[Change, ...]
    real_stacks: tuple[Stack, ...]
    small_stacks: tuple[Stack, ...]
    small_names: tuple[str, ...]  # of its parameters
    small_modules: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Tell whether nothing was shrunk."""
        return not self.changes

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the real model."""
        return sum(each.numel() for each in self.real.parameters())


def shrink_architecture(section: ModelSection, *, head: str, sizes: Sizes) -> Architecture:
    """Return the architecture, small; raises ModelError where it cannot be built, or not be made small."""
    real = meta_model(section, head=head)
    stacks = tuple(find_stacks(real))
    config = load_model_config(section)
    num_parameters = sum(each.numel() for each in real.parameters())
    if num_parameters <= SMALL_PARAMETERS:
        return _finished(real, config, config, stacks, model=real)
    values = config.to_dict()
    keep = _remaining(values, stacks)
    tried = []
    for level in (0, 1, 2):
        small = _with_values(config, shrunk_values(values, keep=keep, level=level, sizes=sizes))
        error = "it has other values" if small is None else _unfit(small, section, head=head, real=stacks)
        if error is None:
            assert small is not None
            return _finished(real, config, small, stacks, model=_meta(small, section, head=head))
        tried.append(error)
    if num_parameters <= MAX_PARAMETERS:
        return _finished(real, config, config, stacks, model=real)
    raise ModelError(
        f"model: `{config.model_type}` cannot be made small here ({'; '.join(dict.fromkeys(tried))}). Rehearse the job "
        "with a small model of the same type: --set model.name=FOLDER."
    )


def build_small(config: PreTrainedConfig, section: ModelSection, *, head: str, seed: int = 0) -> PreTrainedModel:
    """Return the small model with random weights, of the class that its config names where transformers has it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _build(config, section, head=head)


def _build(config: PreTrainedConfig, section: ModelSection, *, head: str) -> PreTrainedModel:
    built: PreTrainedModel = build_from_config(
        HEADS[head], copy.deepcopy(config), dtype=torch.float32, trust_remote_code=section.trust_remote_code
    )
    return built.eval()


def _meta(config: PreTrainedConfig, section: ModelSection, *, head: str) -> PreTrainedModel:
    with torch.device("meta"):
        return _build(config, section, head=head)


def _with_values(config: PreTrainedConfig, values: Values) -> PreTrainedConfig | None:
    try:
        return type(config).from_dict(values)
    except Exception:  # values that do not fit each other: libraries raise anything
        return None


def _unfit(config: PreTrainedConfig, section: ModelSection, *, head: str, real: Sequence[Stack]) -> str | None:
    """Return why the small model does not stand for the real one; None where it does."""
    try:
        meta = _meta(config, section, head=head)
        if sum(each.numel() for each in meta.parameters()) > MAX_PARAMETERS:
            return "too many parameters are left"
        small = {each.name: each for each in find_stacks(meta)}
        for stack in real:
            if stack.name in small and set(stack.kinds) != set(small[stack.name].kinds):
                return f"not every kind of layer in `{stack.name}` was kept"
        model = build_small(config, section, head=head)
        model.config.use_cache = False  # as in training
        error = forward_error(model)
    except Exception as raised:
        error = raised
    return (
        None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    )


def _finished(
    real: PreTrainedModel,
    config: PreTrainedConfig,
    small: PreTrainedConfig,
    stacks: tuple[Stack, ...],
    *,
    model: PreTrainedModel,
) -> Architecture:
    changes = [
        each
        for each in changed_values(config.to_dict(), small.to_dict())
        if each.key.rpartition(".")[2] not in _IGNORED
    ]
    return Architecture(
        real,
        small,
        tuple(replace(each, key=f"config.{each.key}") for each in changes),
        stacks,
        tuple(find_stacks(model)),
        tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
        tuple(name for name, _ in model.named_modules()),
    )


def _remaining(values: Values, stacks: Sequence[Stack]) -> Mapping[str, Sequence[int]]:
    """Return which layers are kept, by the part of the config that counts them."""
    remaining: dict[str, Sequence[int]] = {}
    parts = {"": values} | {name: part for name, part in values.items() if name.endswith("_config") and part}
    for place, part in parts.items():
        counts = {part[name] for name in LAYERS if is_count(part.get(name))} if isinstance(part, dict) else set()
        is_vision = "vision" in place
        own = [each for each in stacks if len(each.kinds) in counts and is_vision == ("vis" in each.name)]
        own = own or [each for each in stacks if len(each.kinds) in counts]
        lists = {len(value) for value in part.values() if isinstance(value, list)} if isinstance(part, dict) else set()
        chosen = [kept_layers(each.kinds, can_pick=len(each.kinds) in lists) for each in own]
        if chosen:
            remaining[place] = max(chosen, key=len)
    return remaining


def from_config_values(written: FromConfigSection, architecture: Architecture) -> Values:
    """Return `model.from_config.values` with those of the small model, each under one of its names only."""
    values: dict[str, Any] = {**written.values}
    names = {own: alias for alias, own in getattr(architecture.config, "attribute_map", {}).items()}
    for change in architecture.changes:
        *place, name = change.key.removeprefix("config.").split(".")
        owner: Any = architecture.config
        for each in place:
            owner = getattr(owner, each, None)
        if isinstance(owner, PreTrainedConfig) and name not in known_names(type(owner)):
            continue  # computed from other values, such as `qk_head_dim`
        part = values
        for each in place:
            part[each] = dict(part.get(each) or {})
            part = part[each]
        part.pop(names.get(name, name), None)
        part[name] = change.now
    return values
