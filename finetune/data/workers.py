"""The number of processes for preparing and loading data: the values of `auto` on this machine."""

import json
import os
from dataclasses import dataclass
from typing import Literal

import torch

from finetune.config.sections.data import DataSection
from finetune.runtime.resources import usable_cores

LoadingCost = Literal["light", "heavy"]
"""The cost of loading a sample: `light` for a memory-mapped row of tokens, `heavy` for decoding, as of images."""

LIGHT_WORKERS, HEAVY_WORKERS = 2, 8
"""The maximum number of loader processes per rank that `auto` starts."""

_CORES_FOR_SECOND_WORKER = 8
"""The number of cores per rank with which a second process for light rows does not compete with others."""


@dataclass(frozen=True)
class MachineResources:
    """The resources of this machine for the processes of a run."""

    num_cores: int  # usable cores, for all ranks on this machine together
    local_world: int  # ranks on this machine
    has_device: bool

    @property
    def cores_per_rank(self) -> int:
        """Return the number of cores per rank, at least 1."""
        return max(1, self.num_cores // self.local_world)


def machine_resources() -> MachineResources:
    """Return the resources, with the number of local ranks from the launcher's environment."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return MachineResources(usable_cores(), local_world, has_device=torch.accelerator.is_available())


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of one rank's loader, with every `auto` resolved."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None  # None without workers


def loader_settings(
    section: DataSection, *, resources: MachineResources | None = None, cost: LoadingCost = "light"
) -> LoaderSettings:
    """Return the settings of one rank's loader on this machine; explicit values are kept.

    If `num_workers: auto` resolves to 0, settings that require workers have no effect.
    """
    resources = resources or machine_resources()
    cores_per_rank = resources.cores_per_rank
    if section.num_workers != "auto":
        num_workers = section.num_workers
    elif cost == "heavy":
        num_workers = min(HEAVY_WORKERS, cores_per_rank - 1)
    elif resources.has_device:  # loading tokens costs less than sending them, so it only pays off with a busy GPU
        num_workers = min(cores_per_rank - 1, LIGHT_WORKERS if cores_per_rank >= _CORES_FOR_SECOND_WORKER else 1)
    else:
        num_workers = 0
    prefetch_factor = section.prefetch_factor
    if prefetch_factor == "auto":
        prefetch_factor = 4 if cost == "heavy" else 2
    return LoaderSettings(
        num_workers=num_workers,
        pin_memory=resources.has_device if section.pin_memory == "auto" else section.pin_memory,
        persistent_workers=num_workers > 0 and section.persistent_workers is not False,
        prefetch_factor=prefetch_factor if num_workers else None,
    )


def num_prepare_workers(section: DataSection, *, resources: MachineResources | None = None) -> int:
    """Return the number of processes that tokenize; only one rank does, so `auto` uses all cores but one."""
    if section.prepare_workers != "auto":
        return section.prepare_workers
    num_cores = (resources or machine_resources()).num_cores
    return num_cores - 1 if num_cores > 2 else 0


def format_loader_settings(
    section: DataSection, settings: LoaderSettings, *, resources: MachineResources
) -> str | None:
    """Return a sentence with the values of the loader, in which `auto` is resolved; None if there are none to report.

    Defaults are only reported if one of them enables something.
    """
    autos = [name for name in _NAMES if getattr(section, name) == "auto"]
    is_reported = not section.model_fields_set.isdisjoint(_NAMES) or any(getattr(settings, name) for name in autos)
    if not autos or not is_reported:
        return None
    values = ", ".join(f"{name}: {json.dumps(getattr(settings, name))}" for name in _NAMES)
    device = "a GPU" if resources.has_device else "no GPU"
    return f"loading: {values} (cores: {resources.num_cores}, ranks: {resources.local_world}, {device})"


_NAMES = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
