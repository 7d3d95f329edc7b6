"""Sums kept on the device until somebody wants to read them: the one place that waits for it."""

import math
import resource
import sys
from dataclasses import dataclass

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


class Meters:
    """Collects steps and turns them into events when they are due."""

    def __init__(self) -> None:
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
        steps = [
            _event(step, record, loss_sum=loss, gradient_norm=norm, memory=memory)
            for (step, record), loss, norm in zip(records, losses, norms, strict=True)
        ]
        warning = self._wait.warning()
        return [*steps, Warned(records[-1][0], warning)] if warning else [*steps]


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


def _event(step: int, record: StepRecord, *, loss_sum: float, gradient_norm: float, memory: int) -> StepTaken:
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
    )
