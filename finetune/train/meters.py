"""Measurements of the steps: sums that stay on the device until they are read, and the time spent waiting for data.

Reading the sums is the only host-device synchronization.

`run.record_layers` adds two norms of every layer's output in the first steps, and a checksum of its bits. Norms are
over all tokens of the step, so they do not depend on how the step is divided into ranks and microbatches. Checksums are
equal only where the bits are, in the same division.
"""

import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.report.events import StepTaken
from finetune.report.gpu import DeviceColumns
from finetune.runtime import distributed

MAX_WAIT_SHARE = 0.1
"""Fraction of the time spent waiting for data above which a warning is logged."""

WINDOW_STEPS, WINDOW_SECONDS = 20, 10.0
"""The fraction is measured over at least this many steps and seconds, so that one slow batch causes no warning."""


class DataWaitMonitor:
    """Measures one rank's time spent waiting for data in consecutive windows, and warns once."""

    def __init__(self) -> None:
        self._is_first = True
        self._has_warned = False
        self._start_window()

    def add(self, waited_seconds: float, *, of_seconds: float) -> None:
        """Add a step; the first one waits for the loader to start and does not count."""
        if self._is_first:
            self._is_first = False
            return
        self._num_steps += 1
        self._waited += waited_seconds
        self._seconds += of_seconds

    def warning(self) -> str | None:
        """Return a warning if too much of a full window was spent waiting, else None; a full window is reset."""
        if self._has_warned or self._num_steps < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return None
        share, num_steps = self._waited / self._seconds, self._num_steps
        self._start_window()
        if share < MAX_WAIT_SHARE:
            return None
        self._has_warned = True
        return (
            f"{share:.0%} of the last {num_steps} steps was spent waiting for data. `finetune doctor --data "
            "--config JOB.yaml` measures the loader and recommends its settings (data.num_workers and others)."
        )

    def _start_window(self) -> None:
        self._num_steps = 0
        self._waited = self._seconds = 0.0


@dataclass(frozen=True)
class StepRecord:
    """The record of one step; its tensors are on the device."""

    number: int  # of the step, from 1
    losses: Tensor  # [microbatches]: their summed losses on this rank
    gradient_norm: Tensor  # a scalar
    is_taken: bool | None  # None: if the norm is finite, which is read later
    sample_ids: tuple[tuple[int, ...], ...]  # per microbatch of this rank
    learning_rate: float
    num_targets: int  # of all ranks, like num_tokens
    num_tokens: int
    samples_sha256: str  # of all samples so far
    epoch: float | None
    seconds: float
    data_seconds: float
    device: Mapping[str, float] = field(default_factory=dict)  # the latest GPU readings
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # the task's other sums on this rank, of any shape


StepMetrics = Callable[..., Mapping[str, float]]
"""The task's `step_metrics`."""


class Meters:
    """Collects steps and turns them into events when they are due."""

    def __init__(
        self, step_metrics: StepMetrics = lambda sums, **_: {}, *, device: DeviceColumns | None = None
    ) -> None:
        self._step_metrics = step_metrics
        self._device = device or DeviceColumns()
        self._records: list[StepRecord] = []
        self._wait = DataWaitMonitor()

    def add(self, record: StepRecord) -> None:
        """Add a step without waiting for the device."""
        self._records.append(replace(record, device=self._device.columns))
        self._wait.add(record.data_seconds, of_seconds=record.seconds)

    def read(self) -> list[tuple[StepRecord, StepTaken]]:
        """Return and drop the collected steps with their events; losses are summed over the ranks.

        The device is read once. Collective if there are any steps.
        """
        records, self._records = self._records, []
        if not records:
            return []
        losses = distributed.sum_in_rank_order(torch.stack([record.losses.sum() for record in records]))
        norms = torch.stack([record.gradient_norm for record in records])  # on the CPU if parameters are offloaded
        columns = [norms[:, None].to(losses), losses[:, None]]
        if records[0].sums:
            flat = [torch.cat([value.flatten() for value in record.sums.values()]) for record in records]
            columns.append(distributed.sum_tensor(torch.stack(flat)))  # [steps, numbers]
        rows = torch.cat(columns, dim=1).tolist()
        memory = peak_memory_bytes()
        steps = []
        for record, (norm, loss, *numbers) in zip(records, rows, strict=True):
            summed = torch.tensor(numbers, dtype=torch.float64)
            values = torch.split(summed, [value.numel() for value in record.sums.values()])
            parts = zip(record.sums.items(), values, strict=True)
            named = {name: part.view(value.shape).tolist() for (name, value), part in parts}  # floats, or nested lists
            layers = take_layer_outputs(named)
            event = StepTaken(
                step=record.number,
                loss=loss / record.num_targets if record.num_targets else math.nan,
                gradient_norm=norm,
                learning_rate=record.learning_rate,
                num_targets=record.num_targets,
                num_tokens=record.num_tokens,
                samples_sha256=record.samples_sha256,
                epoch=record.epoch,
                seconds=record.seconds,
                data_seconds=record.data_seconds,
                data_share=record.data_seconds / record.seconds if record.seconds > 0 else 0.0,
                memory_bytes=memory,
                metrics=dict(self._step_metrics(named, num_targets=record.num_targets)) if named else {},
                device=record.device,
                layers=layers,
            )
            steps.append((record, event))
        return steps

    def warning(self) -> str | None:
        """Return a warning, once each, if too much time was spent waiting for batches, or if the GPU is lost."""
        return self._wait.warning() or self._device.warning()


def sum_over_ranks(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return named scalars of one dtype summed over the ranks, in that dtype. Collective."""
    if not sums:
        return {}
    return dict(zip(sums, distributed.sum_tensor(torch.stack(list(sums.values()))).tolist(), strict=True))


def peak_memory_bytes() -> int:
    """Return this rank's peak memory: allocated device memory, or resident memory without a GPU."""
    if torch.cuda.is_available():
        return max(_peak_before_reset, torch.cuda.max_memory_allocated())
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


@contextmanager
def keep_peak_memory() -> Iterator[None]:
    """Exclude GPU allocations in this context from the peak memory."""
    global _peak_before_reset
    if not torch.cuda.is_available():
        yield
        return
    _peak_before_reset = peak_memory_bytes()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


_peak_before_reset = 0


RECORDED_STEPS = 3
"""Number of steps of a start whose layer outputs are recorded."""

NORMS = ("norm", "projected_norm")

_NUMBERS = (*NORMS, "positions", "checksum")
_PREFIX = "layer output "  # of the names of these sums
_MASKS = ("attention_mask", "decoder_attention_mask")
_CHECKSUM_RANGE = 2**32  # sums over thousands of batches are exact in float64
_ODD = 0x9E3779B1  # of multiplicative hashing (Knuth)


class RecordedTask:
    """Wraps what a step trains on: adds sums over the outputs of modules to its own, and changes nothing else.

    They are taken by hooks within `loss_sums`, hence not when a layer is computed again in the backward pass, and are 0
    after `stop`. `task` is a StepTask; `model` is the unwrapped model, whose masks mark padding, which does not count.
    """

    def __init__(self, task: Any, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._task = task
        self._names = tuple(modules)
        self._sums: dict[str, Tensor] | None = None
        self._masks: list[Tensor] = []
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._read_masks, with_kwargs=True)]
        self._hooks += [module.register_forward_hook(partial(self._add, name)) for name, module in modules.items()]

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches that the task prepared. Collective."""
        prepared: Sequence[Batch] = self._task.prepare_step(model, batches)
        return prepared

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the task's and the layers' sums; compiled code runs eagerly, so that it contains no hook."""
        zeros = torch.zeros(len(_NUMBERS), dtype=torch.float64, device=batch.labels.device)
        sums = {f"{_PREFIX}{name}": zeros.clone() for name in self._names}
        if not self._hooks:
            return {**self._task.loss_sums(model, batch), **sums}
        self._sums = sums
        try:
            with torch.compiler.set_stance("force_eager"):
                return {**self._task.loss_sums(model, batch), **sums}
        finally:
            self._sums, self._masks = None, []

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics."""
        metrics: Mapping[str, float] = self._task.step_metrics(sums, num_targets=num_targets)
        return metrics

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _read_masks(self, _: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        self._masks = [named[name] for name in _MASKS if isinstance(named.get(name), Tensor)]

    @torch.no_grad()
    def _add(self, name: str, _: nn.Module, arguments: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if self._sums is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        rows = value.detach().flatten(0, -2)  # [positions, width]
        masks = [mask for mask in self._masks if mask.shape == value.shape[:-1]]
        counts = masks[0].flatten() != 0 if masks else torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        # A LayerNorm's output has nearly the same norm whatever it reads; its share in one direction has not.
        signs = ((torch.arange(rows.shape[1], device=rows.device) * _ODD >> 15) & 1) * 2 - 1
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32), (rows.float() * signs).sum(dim=1)
        squares = [torch.where(counts, norm.double().square(), 0).sum() for norm in norms]
        self._sums[f"{_PREFIX}{name}"] += torch.stack([*squares, counts.sum().double(), _checksum(rows, counts)])


def _checksum(rows: Tensor, counts: Tensor) -> Tensor:
    """Return a number below 2^32 of the bits and places of the rows that count, a float64 scalar."""
    bits = rows.contiguous().view(torch.int16 if rows.element_size() == 2 else torch.int32)
    width, length = (torch.arange(size, device=rows.device) * 2 + 1 for size in (bits.shape[1], len(bits)))
    of_rows = (bits * (width * _ODD).to(torch.int32)).sum(dim=1) * length * _ODD
    return (torch.where(counts, of_rows, 0).sum() % _CHECKSUM_RANGE).double()


def take_layer_outputs(sums: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Remove the sums of layer outputs of a whole step and return its norms, positions and checksum by module."""
    taken = {name.removeprefix(_PREFIX): sums.pop(name) for name in tuple(sums) if name.startswith(_PREFIX)}
    return {
        name: dict(zip(_NUMBERS, (*map(math.sqrt, numbers[:2]), *numbers[2:]), strict=True))
        for name, numbers in taken.items()
        if any(numbers)
    }
