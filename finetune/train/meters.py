"""Measurements of the steps: sums that stay on the device until they are read, and the time spent waiting for data.

Reading the sums is the only host-device synchronization.
"""

import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from finetune.report.events import StepTaken
from finetune.report.gpu import DeviceColumns
from finetune.runtime import distributed
from finetune.train.layer_outputs import take_layer_outputs

MAX_WAIT_SHARE = 0.1
"""Fraction of the time spent waiting for data above which a warning is logged."""

WINDOW_STEPS, WINDOW_SECONDS = 20, 10.0
"""The fraction is measured over at least this many steps and seconds, so that one slow batch causes no warning."""


class DataWaitMonitor:
    """Measures one rank's time spent waiting for data in consecutive windows, and warns once."""

    def __init__(self) -> None:
        self._is_first = True
        self._has_warned = False
        self._num_steps = 0
        self._waited_seconds = 0.0
        self._seconds = 0.0

    def add(self, waited_seconds: float, *, of_seconds: float) -> None:
        """Add a step; the first one waits for the loader to start and does not count."""
        if self._is_first:
            self._is_first = False
            return
        self._num_steps += 1
        self._waited_seconds += waited_seconds
        self._seconds += of_seconds

    def warning(self) -> str | None:
        """Return a warning if too much of a full window was spent waiting, else None; a full window is reset."""
        if self._has_warned or self._num_steps < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return None
        share, num_steps = self._waited_seconds / self._seconds, self._num_steps
        self._num_steps = 0
        self._waited_seconds = 0.0
        self._seconds = 0.0
        if share < MAX_WAIT_SHARE:
            return None
        self._has_warned = True
        return (
            f"{share:.0%} of the last {num_steps} steps was spent waiting for data. `finetune doctor --data "
            "--config JOB.yaml` measures the loader and recommends its settings (data.num_workers and others)."
        )


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

        The device is read once, unless the task's other sums have changed. Collective if there are any steps.
        """
        records, self._records = self._records, []
        alike = (list(group) for _, group in groupby(records, key=lambda record: list(record.sums)))
        return [step for group in alike for step in self._read(group)]

    def warning(self) -> str | None:
        """Return a warning, once, if too much time was spent waiting for batches."""
        return self._wait.warning()

    def _read(self, records: Sequence[StepRecord]) -> list[tuple[StepRecord, StepTaken]]:
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
