"""How many processes prepare and load: what `auto` comes to on this machine."""

from dataclasses import dataclass

from finetune.config.sections.data import DataSection


@dataclass(frozen=True)
class LoaderSettings:
    """How one rank's loader works, with every `auto` resolved."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None  # None without workers


def loader_settings(section: DataSection) -> LoaderSettings:
    """Return the settings of one rank's loader on this machine."""
    num_workers = 0 if section.num_workers == "auto" else section.num_workers
    return LoaderSettings(
        num_workers=num_workers,
        pin_memory=section.pin_memory is True,
        persistent_workers=section.persistent_workers is True,
        prefetch_factor=None if section.prefetch_factor == "auto" else section.prefetch_factor,
    )


def num_prepare_workers(section: DataSection) -> int:
    """Return how many processes tokenise."""
    return 0 if section.prepare_workers == "auto" else section.prepare_workers
