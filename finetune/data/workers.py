"""How many processes prepare and load: what `auto` comes to on this machine."""

import json
import os
from dataclasses import dataclass
from typing import Literal

import torch

from finetune.config.sections.data import DataSection
from finetune.runtime.resources import usable_cores

LoadingCost = Literal["light", "heavy"]
"""What a sample costs the loader: `light` is a memory-mapped row of tokens, `heavy` decodes, as images do."""

LIGHT_WORKERS, HEAVY_WORKERS = 2, 8
"""The most loader processes per rank that `auto` starts."""

_ROOMY = 8
"""Cores per rank from which on a second process for light rows cannot be in anybody's way."""


@dataclass(frozen=True)
class MachineResources:
    """What this machine gives to the processes of a run."""

    num_cores: int  # that may be used, by all ranks on this machine together
    local_world: int  # ranks on this machine
    has_device: bool

    @property
    def cores_per_rank(self) -> int:
        """Return the whole cores that each rank may count on; at least 1."""
        return max(1, self.num_cores // self.local_world)


def machine_resources() -> MachineResources:
    """Return what there is, by the launcher's environment."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return MachineResources(usable_cores(), local_world, has_device=torch.accelerator.is_available())


@dataclass(frozen=True)
class LoaderSettings:
    """How one rank's loader works, with every `auto` resolved."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None  # None without workers


def loader_settings(
    section: DataSection, *, resources: MachineResources | None = None, cost: LoadingCost = "light"
) -> LoaderSettings:
    """Return the settings of one rank's loader on this machine; what is written is kept as it is written.

    Only a `num_workers: auto` that comes to 0 takes the effect from what needs workers.
    """
    resources = resources or machine_resources()
    num_workers = _num_workers(resources, cost) if section.num_workers == "auto" else section.num_workers
    pins, persists = section.pin_memory, section.persistent_workers
    prefetched = _prefetched(cost) if section.prefetch_factor == "auto" else section.prefetch_factor
    return LoaderSettings(
        num_workers=num_workers,
        pin_memory=resources.has_device if pins == "auto" else pins,
        persistent_workers=num_workers > 0 and persists is not False,
        prefetch_factor=prefetched if num_workers else None,
    )


def num_prepare_workers(section: DataSection, *, resources: MachineResources | None = None) -> int:
    """Return how many processes tokenize; one rank of all does it, so `auto` takes every core but one."""
    if section.prepare_workers != "auto":
        return section.prepare_workers
    num_cores = (resources or machine_resources()).num_cores
    return num_cores - 1 if num_cores > 2 else 0


def format_loader_settings(
    section: DataSection, settings: LoaderSettings, *, resources: MachineResources
) -> str | None:
    """Return in a sentence what every `auto` of the loader has resolved to; None where there is nothing to say.

    An `auto` that is the default is mentioned only where it turns something on, or where it disables what was written.
    """
    autos = [name for name in _NAMES if getattr(section, name) == "auto"]
    written = [name for name in autos if name in section.model_fields_set or getattr(settings, name)]
    if not written and _without_effect(section, settings):
        written = ["num_workers"]
    if not written:
        return None
    device = "a GPU" if resources.has_device else "no GPU"
    here = f"{_count(resources.num_cores, 'core')} for {_count(resources.local_world, 'rank')}, {device}"
    values = ", ".join(f"{name}: {json.dumps(getattr(settings, name))}" for name in written)
    return f"loading: {values} ({here}){_without_effect(section, settings)}"


_NAMES = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")


def _num_workers(resources: MachineResources, cost: LoadingCost) -> int:
    """Rows of tokens cost less than handing them over, so a process for them pays only next to a busy GPU."""
    spare = resources.cores_per_rank - 1
    if cost == "heavy":
        return min(HEAVY_WORKERS, spare)
    if not resources.has_device:
        return 0
    return min(spare, LIGHT_WORKERS if resources.cores_per_rank >= _ROOMY else 1)


def _prefetched(cost: LoadingCost) -> int:
    return 4 if cost == "heavy" else 2


def _without_effect(section: DataSection, settings: LoaderSettings) -> str:
    """Return which written keys have no effect because `num_workers: auto` resolved to 0."""
    asked = {
        "persistent_workers": section.persistent_workers is True,
        "prefetch_factor": isinstance(section.prefetch_factor, int),
    }
    idle = [f"`{name}`" for name, is_asked in asked.items() if is_asked]
    if settings.num_workers or not idle:
        return ""
    return f"; {' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect without workers"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
