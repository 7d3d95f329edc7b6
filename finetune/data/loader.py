"""Data loaders: the world's microbatches in order; Accelerate gives rank r every world_size-th.

A rank's batches are grouped by step; on an accelerator, the next group is copied while the current one is used. At the
end: the number of processes that load and prepare data, which are the values of `auto` on this machine.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from finetune.config.sections.data import DataSection
from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, LongestFirstOrder, Order, Samples, set_order
from finetune.data.token_cache.integrity import Collate, collate_with_checksums
from finetune.data.token_cache.store import TokenCache
from finetune.errors import StrategyError
from finetune.runtime.distributed import RankGroup
from finetune.runtime.optional import no_op
from finetune.runtime.processes import ForkBlockingSignals, ignore_run_signals
from finetune.runtime.resources import usable_cores
from finetune.runtime.seeds import derive_seed

LoadingCost = Literal["light", "heavy"]
"""The cost of loading a sample: `light` for a memory-mapped row of tokens, `heavy` for decoding, as of images."""


class TrainSampler(Sampler[list[tuple[int, int]]]):
    """The sample ids of every microbatch of steps [first_step, num_steps), over the whole world, in order.

    Step s has positions [s * global_batch_size, (s + 1) * global_batch_size), split into microbatches: the samples of a
    step are the same at any world size, and starting at a later step does not iterate over earlier ones. Each id comes
    with the seed of its step.
    """

    batch_size = None  # Accelerate then passes batches unchanged and does not complete the last one
    drop_last = False

    def __init__(
        self,
        order: Order,
        *,
        global_batch_size: int,
        microbatch_size: int,
        first_step: int,
        num_steps: int,
        seed: int = 0,
    ) -> None:
        if global_batch_size % microbatch_size:
            raise ValueError(
                f"a global batch of {global_batch_size} cannot be split into microbatches of {microbatch_size}"
            )
        self._order = order
        self._global_batch_size = global_batch_size
        self._microbatch_size = microbatch_size
        self._steps = range(first_step, num_steps)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._steps) * (self._global_batch_size // self._microbatch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self._steps:
            start, step_seed = step * self._global_batch_size, derive_seed(self._seed, "samples", step)
            for samples in self._order.cut(start, start + self._global_batch_size, self._microbatch_size):
                yield [(sample, step_seed) for sample in samples.tolist()]


@dataclass(frozen=True)
class SeededSamples:
    """Samples with the seed of their step, and with a partner if `partners` is given.

    A partner is a random sample of an epoch of that order, determined by step and sample, not by microbatches.
    """

    samples: Samples
    partners: Order | None = None

    def __getitem__(self, seeded_id: tuple[int, int]) -> Features:
        sample_id, seed = seeded_id
        sample = replace(self.samples[sample_id], seed=seed)
        if self.partners is None:
            return sample
        position = derive_seed(seed, "partner", sample_id) % (self.partners.num_positions or 1)
        (partner,) = self.partners.samples(position, position + 1).tolist()
        return replace(sample, partner=replace(self.samples[partner], seed=seed))


def training_batch(
    view: DatasetView, collate: Collate, sample_ids: np.ndarray, *, step: int, seed: int, has_partners: bool
) -> Batch:
    """Return the microbatch of these samples as `train_loader` yields it in the step, counted from 0."""
    samples = SeededSamples(view.samples, view.order if has_partners else None)
    step_seed = derive_seed(seed, "samples", step)
    return _CollateSeeded(collate, view.samples)([samples[int(sample_id), step_seed] for sample_id in sample_ids])


class EvaluationSampler(Sampler[list[int]]):
    """One epoch of the order, padded with empty microbatches to a multiple of the world size."""

    batch_size = None
    drop_last = False

    def __init__(self, order: Order, *, microbatch_size: int, world: int) -> None:
        self._order = order
        self._num_positions = order.num_positions or 0
        self._num_filled = -(-self._num_positions // microbatch_size)
        self._microbatch_size = microbatch_size
        self._world = world

    def __len__(self) -> int:
        return -(-self._num_filled // self._world) * self._world

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self._order.cut(0, self._num_positions, self._microbatch_size):
            yield samples.tolist()
        yield from ([] for _ in range(len(self) - self._num_filled))


def train_loader(
    view: DatasetView,
    collate: Collate,
    *,
    global_batch_size: int,
    microbatch_size: int,
    first_step: int,
    num_steps: int,
    section: DataSection,
    seed: int = 0,
    cost: LoadingCost = "light",
    has_partners: bool = False,
) -> DataLoader[Any]:
    """Return a loader of the world's microbatches from `first_step` to the end of the run, for Accelerate to prepare.

    `cost` is the cost of loading a sample; with `has_partners`, each sample comes with another one.
    """
    sampler = TrainSampler(
        view.order,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        first_step=first_step,
        num_steps=num_steps,
        seed=seed,
    )
    samples = SeededSamples(view.samples, view.order if has_partners else None)
    return _loader(samples, sampler, _CollateSeeded(collate, view.samples), section=section, cost=cost)


def evaluation_loader(
    prepared: TokenCache,
    collate: Collate,
    *,
    dummy_batch: Callable[[Features], Batch],
    microbatch_size: int,
    world: int,
    section: DataSection,
    cost: LoadingCost = "light",
) -> DataLoader[Any]:
    """Return a loader of every sample once; dummy batches without targets equalize the number of batches of all ranks.

    Samples are packed or batched by tokens like the training samples; padded batches have samples of similar length.
    """
    batching = section.batching
    if batching.by == "samples" and batching.padding_free is not True:
        order: Order = LongestFirstOrder(prepared.lengths)
    else:
        order = set_order(prepared.lengths, seed=0, shuffle=False, batching=batching, max_length=section.longest)
    sampler = EvaluationSampler(order, microbatch_size=microbatch_size, world=world)
    return _loader(prepared, sampler, _CollateOrDummy(prepared, collate, dummy_batch), section=section, cost=cost)


@dataclass(frozen=True)
class _CollateSeeded:
    """Collates training samples; randomness in collation is derived from the batch's seed."""

    collate: Collate
    samples: Samples

    def __call__(self, features: Sequence[Features]) -> Batch:
        batch = collate_with_checksums(self.collate, features, samples=self.samples)
        lengths = batch.lengths or tuple(sample.length for sample in features)
        return replace(batch, seed=features[0].seed, lengths=lengths)


@dataclass(frozen=True)
class _CollateOrDummy:
    prepared: TokenCache
    collate: Collate
    dummy_batch: Callable[[Features], Batch]

    def __call__(self, features: Sequence[Features]) -> Batch:
        if not features:
            return self.dummy_batch(self.prepared[0])
        return collate_with_checksums(self.collate, features, samples=self.prepared)


def _loader(
    samples: Samples | SeededSamples,
    sampler: Sampler[Any],
    collate: Collate,
    *,
    section: DataSection,
    cost: LoadingCost,
) -> DataLoader[Any]:
    settings, is_forking = loader_settings(section, cost=cost), multiprocessing.get_start_method() == "fork"
    return DataLoader(
        cast(Dataset[Features], samples),  # only `__getitem__` is used
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        persistent_workers=settings.persistent_workers,
        prefetch_factor=settings.prefetch_factor,
        worker_init_fn=ignore_run_signals,
        multiprocessing_context=ForkBlockingSignals() if settings.num_workers and is_forking else None,
        generator=torch.Generator().manual_seed(0),  # otherwise workers' seeds are drawn from the global generator
    )


Group = tuple[Batch, ...]


class DeviceCopyStream:
    """A separate stream of an accelerator, on which copies run concurrently with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream(device)

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which copies do not wait for the computation."""
        context: AbstractContextManager[Any] = self._device.stream(self._stream)
        return context

    def wait_and_keep(self, group: Group) -> None:
        """Make the next computation wait for the copies, and keep their memory until it is done."""
        current = self._device.current_stream()
        current.wait_stream(self._stream)
        for batch in group:
            for tensor in batch.tensors():
                tensor.record_stream(current)


class StepLoader:
    """A rank's batches in groups of `num_batches`, one group per step, on the device; can be iterated repeatedly.

    If ranks share rows, each gets its slices. If they `are_copies`, another rank computes the same batches and counts
    them. With a stream, the copy of the next group starts before a group is yielded; it is asynchronous if the batches
    are in page-locked memory. Raises ValueError if the last group is not full.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        num_batches: int,
        device: torch.device,
        *,
        sequence: RankGroup = RankGroup(),  # noqa: B008  # frozen
        are_copies: bool = False,
        first_step: int = 0,
        on_group: Callable[[int, Group], None] = no_op,
        on_step_end: Callable[[int], None] = no_op,
        stream: DeviceCopyStream | None = None,
    ) -> None:
        """`on_group` is called before a group is yielded, `on_step_end` when the next one is requested.

        Both get the step, counted from 1; `first_step` steps have been taken before. Without a given stream, a new
        one is created on an accelerator; on a CPU, batches are yielded unchanged.
        """
        self._batches = batches
        self._num_batches = num_batches
        self._device = device
        self._sequence = sequence
        self._are_copies = are_copies
        self._first_step = first_step
        self._on_group = on_group
        self._on_step_end = on_step_end
        self._stream = DeviceCopyStream(device) if stream is None and device.type != "cpu" else stream

    def __iter__(self) -> Iterator[Group]:
        for step, group in enumerate(self._groups_on_device(), self._first_step + 1):
            self._on_group(step, group)
            yield group
            self._on_step_end(step)

    def _groups_on_device(self) -> Iterator[Group]:
        batches = (slice_batch(batch, self._sequence) for batch in self._batches)
        if self._are_copies:
            batches = (replace(batch, num_targets=0, num_tokens=0, is_copy=True) for batch in batches)
        groups = zip(*[batches] * self._num_batches, strict=True)
        stream = self._stream
        if stream is None:
            yield from groups
            return
        copied = self._start_copy(groups, stream)
        while copied is not None:
            group = copied
            stream.wait_and_keep(group)
            copied = self._start_copy(groups, stream)
            yield group

    def _start_copy(self, groups: Iterator[Group], stream: DeviceCopyStream) -> Group | None:
        group = next(groups, None)
        if group is None:
            return None
        with stream.context():
            return tuple(batch.to(self._device, non_blocking=True) for batch in group)


def slice_batch(batch: Batch, group: RankGroup) -> Batch:
    """Return this rank's slice of the row: its tokens, labels, targets and counts, and the starts of all samples.

    A row that cannot be split evenly is extended by a sample with fewer tokens than ranks, which is isolated by the
    attention and not counted. Raises StrategyError for a batch with padding.
    """
    if group.size == 1:
        return batch
    if batch.cumulative_lengths is None or batch.targets is None:
        raise StrategyError(
            "sequence parallelism requires rows without padding, but this batch is padded. Write "
            "`data.batching.by: packs`, or `padding_free: true`."
        )
    num_tokens = batch.labels.numel()
    width = -(-num_tokens // group.size)
    num_added, start = width * group.size - num_tokens, width * group.index
    positions = batch.targets.positions
    first, past = torch.searchsorted(positions, torch.tensor([start, start + width])).tolist()
    edges = batch.cumulative_lengths
    return replace(
        batch,
        inputs={name: _sliced(row, start, width, added=range(num_added)) for name, row in batch.inputs.items()},
        labels=_sliced(batch.labels, start, width, added=[IGNORED] * num_added),
        num_targets=past - first,
        num_tokens=max(0, min(width, num_tokens - start)) if batch.num_tokens else 0,
        cumulative_lengths=torch.cat([edges, edges[-1:] + num_added]) if num_added else edges,
        longest=max(batch.longest, num_added),
        lengths=(*batch.lengths, num_added) if num_added else batch.lengths,
        targets=Targets(positions[first:past] - start, batch.targets.labels[first:past], (past - first,)),
        num_slices=group.size,
        slice_number=group.index,
    )


def _sliced(row: Tensor, start: int, width: int, *, added: Iterable[int]) -> Tensor:
    """Return a slice of the row extended by the added ids or positions, [1, width]."""
    extended = torch.cat([row, torch.tensor([list(added)], dtype=row.dtype)], dim=1)
    return extended[:, start : start + width].clone()


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
