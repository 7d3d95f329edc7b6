"""The record of `run.record_layers`: two norms of every layer's output in the first steps, and a checksum of its bits.

Norms are over all tokens of the step, so they do not depend on how the step is divided into ranks and microbatches.
Checksums are equal only where the bits are, in the same division.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch

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

    They are taken by hooks within `loss_sums`, hence not when a layer is computed again in the backward pass, until
    `stop`. `task` is a StepTask; `model` is the unwrapped model, whose masks mark padding, which does not count.
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
        sums: Mapping[str, Tensor]
        if not self._hooks:
            sums = self._task.loss_sums(model, batch)
            return sums
        zeros = torch.zeros(len(_NUMBERS), dtype=torch.float64, device=batch.labels.device)
        self._sums = {f"{_PREFIX}{name}": zeros.clone() for name in self._names}
        try:
            with torch.compiler.set_stance("force_eager"):
                return {**self._task.loss_sums(model, batch), **self._sums}
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
        if any(numbers)  # else the module was not called
    }
