"""Sums kept on the device until somebody wants to read them: the one place that waits for it."""

import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finetune.report.events import Event, StepTaken, Warned
from finetune.runtime import ranks
from finetune.train.waiting import DataWait


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves behind; tensors are scalars on the device."""

    loss_sum: Tensor  # of this rank
    gradient_norm: Tensor
    learning_rate: float
    num_targets: int  # of all ranks, as num_tokens
    num_tokens: int
    samples_sha256: str  # of all samples so far
    epoch: float | None
    seconds: float
    data_seconds: float
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # of this rank, what the task sums beside the loss


StepMetrics = Callable[..., Mapping[str, float]]
"""The task's `step_metrics`."""


def no_metrics(sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
    """Return nothing."""
    return {}


class Meters:
    """Collects steps and turns them into events when they are due."""

    def __init__(self, step_metrics: StepMetrics = no_metrics) -> None:
        self._step_metrics = step_metrics
        self._records: list[tuple[int, StepRecord]] = []
        self._wait = DataWait()

    def add(self, step: int, record: StepRecord) -> None:
        """Take in the step that made it `step` steps, without waiting for the device."""
        self._records.append((step, record))
        self._wait.add(record.data_seconds, of_seconds=record.seconds)

    def flush(self) -> list[Event]:
        """Return the collected steps as events, losses added up over the ranks, and forget them. Collective.

        Behind them, once in a run, a warning where too much of the time was spent waiting for batches.
        """
        records, self._records = self._records, []
        if not records:
            return []
        losses = ranks.sum_tensor(torch.stack([record.loss_sum for _, record in records])).tolist()
        norms = torch.stack([record.gradient_norm for _, record in records]).tolist()
        memory = peak_memory_bytes()
        metrics = self._metrics([record for _, record in records])
        steps = [
            _event(step, record, loss_sum=loss, gradient_norm=norm, metrics=each, memory=memory)
            for (step, record), loss, norm, each in zip(records, losses, norms, metrics, strict=True)
        ]
        warning = self._wait.warning()
        return [*steps, Warned(records[-1][0], warning)] if warning else [*steps]

    def _metrics(self, records: Sequence[StepRecord]) -> list[Mapping[str, float]]:
        """Return what the task shows of each step, its sums added up over the ranks. Collective where there are any."""
        names = list(records[0].sums)
        if not names:
            return [{} for _ in records]
        added = ranks.sum_tensor(torch.stack([torch.stack([each.sums[name] for name in names]) for each in records]))
        return [
            dict(self._step_metrics(dict(zip(names, sums, strict=True)), num_targets=record.num_targets))
            for record, sums in zip(records, added.tolist(), strict=True)
        ]


def is_finite(tensor: Tensor) -> bool:
    """Tell whether every element is finite; waits for the device."""
    return bool(torch.isfinite(tensor).all().item())


def numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return named scalars of one type added up over the ranks, in that type. Collective."""
    if not sums:
        return {}
    return dict(zip(sums, ranks.sum_tensor(torch.stack(list(sums.values()))).tolist(), strict=True))


def peak_memory_bytes() -> int:
    """Return this rank's peak: allocated device memory, or resident memory where there is no device."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _event(
    step: int,
    record: StepRecord,
    *,
    loss_sum: float,
    gradient_norm: float,
    metrics: Mapping[str, float],
    memory: int,
) -> StepTaken:
    return StepTaken(
        step=step,
        loss=loss_sum / record.num_targets if record.num_targets else math.nan,
        gradient_norm=gradient_norm,
        learning_rate=record.learning_rate,
        num_targets=record.num_targets,
        num_tokens=record.num_tokens,
        samples_sha256=record.samples_sha256,
        epoch=record.epoch,
        seconds=record.seconds,
        data_seconds=record.data_seconds,
        data_share=record.data_seconds / record.seconds if record.seconds > 0 else 0.0,
        memory_bytes=memory,
        metrics=metrics,
    )
