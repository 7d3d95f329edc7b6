"""Throughput of a data loader under several settings, measured in turn over several rounds."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.utils.data import DataLoader

from finetune.data.batch import Batch
from finetune.data.workers import LoaderSettings, MachineResources

MIN_BATCHES = 4

MakeLoader = Callable[..., "DataLoader[Batch]"]
"""From settings and `first_step` to a loader of one rank's batches, endless unless `num_steps` is given."""


@dataclass(frozen=True)
class LoaderRun:
    """One measurement: the time to the first batch, and the pace of those behind it."""

    first_seconds: float
    samples_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class LoaderMeasurement:
    """All measurements of one setting."""

    settings: LoaderSettings
    passes: tuple[LoaderRun, ...]

    @property
    def samples_per_second(self) -> float:
        """Return the median over the rounds."""
        return median(each.samples_per_second for each in self.passes)

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the rounds."""
        return median(each.tokens_per_second for each in self.passes)

    @property
    def first_seconds(self) -> float:
        """Return the median time to the first batch."""
        return median(each.first_seconds for each in self.passes)

    @property
    def spread(self) -> float:
        """Return how far apart the fastest and the slowest round are, as a share of the median."""
        rates = [each.samples_per_second for each in self.passes]
        return (max(rates) - min(rates)) / self.samples_per_second if self.samples_per_second else 0.0


def settings_to_try(resources: MachineResources) -> list[LoaderSettings]:
    """Return what is worth a try on this machine: no worker, 1, 2, 4, ... up to its cores per rank."""
    numbers = [number for number in (1, 2, 4, 8, 16, 32) if number <= max(2, resources.cores_per_rank)]
    pins = (False, True) if resources.has_device else (False,)
    found = [LoaderSettings(0, pin, False, None) for pin in pins]
    for number in numbers:
        found += [LoaderSettings(number, pin, False, 2) for pin in pins]
        found.append(LoaderSettings(number, resources.has_device, False, 4))
    return found


def measure(
    make_loader: MakeLoader,
    settings: Sequence[LoaderSettings],
    *,
    num_rounds: int,
    seconds: float,
    log: Callable[[str], None],
) -> list[LoaderMeasurement]:
    """Return the settings as they were measured, each once a round, in another order in each round."""
    found: Mapping[LoaderSettings, list[LoaderRun]] = {each: [] for each in settings}
    for number in range(num_rounds):
        log(f"round {number + 1} of {num_rounds}")
        for each in random.Random(number).sample(list(settings), len(settings)):
            found[each].append(_measure_once(make_loader(each, first_step=number), seconds=seconds))
    return [LoaderMeasurement(each, tuple(passes)) for each, passes in found.items()]


def seconds_between_passes(make_loader: MakeLoader, settings: LoaderSettings) -> float:
    """Return the time to the first batch of a second pass over the same loader, as in a repeated evaluation."""
    loader = make_loader(settings, first_step=0, num_steps=1)
    for _ in loader:
        pass
    started = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - started


def _measure_once(loader: "DataLoader[Batch]", *, seconds: float) -> LoaderRun:
    started = time.perf_counter()
    batches = _on_device(loader)
    next(batches)
    first = begun = time.perf_counter()
    samples = tokens = 0
    for number, batch in enumerate(batches, start=1):
        samples, tokens = samples + len(batch.sample_ids), tokens + batch.num_tokens
        if number >= MIN_BATCHES and time.perf_counter() - begun >= seconds:
            break
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    taken = time.perf_counter() - begun
    return LoaderRun(first - started, samples / taken, tokens / taken)


def _on_device(loader: "DataLoader[Batch]") -> Iterator[Batch]:
    """Yield the batches where training would have them: copied to the GPU where there is one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for batch in loader:
        yield batch if device is None else batch.to(device, non_blocking=True)
