"""The record of `run.record_layers`: the size of every layer's output in the first steps, and a checksum of its bits.

The norm is over all tokens of the step, so it does not depend on how the step is divided into ranks and microbatches.
The checksum is equal only where the bits are, in the same division.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch

RECORDED_STEPS = 3
"""Number of steps of a start whose layer outputs are recorded."""

_PREFIX = "layer output "  # of the names of these sums
_MASKS = ("attention_mask", "decoder_attention_mask")
_CHECKSUM_RANGE = 2**32  # sums over thousands of batches are exact in float64
_ODD = 0x9E3779B1  # of multiplicative hashing (Knuth)


class LayerRecorder:
    """Sums over the outputs of modules within `recording()`, by hooks; recomputation in the backward pass is not in it.

    `model` is the unwrapped model, whose masks mark padding, which does not count.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._sums: dict[str, Tensor] | None = None
        self._masks: list[Tensor] = []
        self._names = tuple(modules)
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._read_masks, with_kwargs=True)]
        self._hooks += [module.register_forward_hook(partial(self._add, name)) for name, module in modules.items()]

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Yield, by module, the sums of squares, the number of positions and the checksum, all 0 after the last step.

        Compiled code runs eagerly, so that no hook becomes a part of it.
        """
        sums = {name: torch.zeros(4, dtype=torch.float64, device=device) for name in self._names}
        if not self._hooks:
            yield sums
            return
        self._sums = sums
        try:
            with torch.compiler.set_stance("force_eager"):
                yield sums
        finally:
            self._sums, self._masks = None, []

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
        squares = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).double().square()
        projected = (rows.float() * _signs(rows.shape[1], device=rows.device)).sum(dim=1).double().square()
        sums = [torch.where(counts, values, 0).sum() for values in (squares, projected)]
        sums += [counts.sum(), _checksum(rows, counts)]
        self._sums[name] += torch.stack([number.double() for number in sums])


def _signs(width: int, *, device: torch.device) -> Tensor:
    """Return a direction, 1 or -1 in each channel: the norm of what a LayerNorm returns hardly depends on its input."""
    return ((torch.arange(width, device=device) * _ODD >> 15) & 1) * 2 - 1


def _checksum(rows: Tensor, counts: Tensor) -> Tensor:
    """Return a number below 2^32 of the bits and places of the rows that count, an int64 scalar."""
    bits = rows.contiguous().view(torch.int16 if rows.element_size() == 2 else torch.int32)
    width, length = (torch.arange(size, device=rows.device) * 2 + 1 for size in (bits.shape[1], len(bits)))
    of_rows = (bits * (width * _ODD).to(torch.int32)).sum(dim=1) * length * _ODD
    return torch.where(counts, of_rows, 0).sum() % _CHECKSUM_RANGE


@dataclass(frozen=True)
class RecordedTask:
    """Wraps what a step trains on: adds the sums of the layers' outputs to its own, and changes nothing else."""

    task: Any  # a StepTask
    recorder: LayerRecorder

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches that the task prepared. Collective."""
        prepared: Sequence[Batch] = self.task.prepare_step(model, batches)
        return prepared

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the task's sums and those of the layers."""
        with self.recorder.recording(batch.labels.device) as sums:
            own = self.task.loss_sums(model, batch)
        return {**own, **{f"{_PREFIX}{name}": value for name, value in sums.items()}}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics."""
        metrics: Mapping[str, float] = self.task.step_metrics(sums, num_targets=num_targets)
        return metrics


def take_layer_outputs(sums: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Remove the sums of layer outputs of a whole step and return its norms, positions and checksum by module."""
    taken = {name: sums.pop(name) for name in tuple(sums) if name.startswith(_PREFIX)}
    return {
        name.removeprefix(_PREFIX): {
            "norm": math.sqrt(squares),
            "projected_norm": math.sqrt(projected),
            "positions": positions,
            "checksum": checksum,
        }
        for name, (squares, projected, positions, checksum) in taken.items()
        if positions
    }
