"""Batch normalisation that does not depend on how a step's batch is cut into microbatches and ranks.

By default it normalises over the microbatch of one rank (Ioffe & Szegedy, 2015, arXiv:1502.03167), so the loss
depends on the number of processes. Here it is either frozen, as is usual in fine-tuning, or normalises over groups of
consecutive samples of the step (ghost batch normalisation: Hoffer et al., 2017, arXiv:1705.08741). The groups are the
same however the step is cut, as long as each microbatch holds whole groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.errors import ModelError
from finetune.runtime import distributed

SUPPORTED_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that only normalise; subclasses may do more."""

_BatchNorm = nn.modules.batchnorm._BatchNorm


def set_batch_norm(model: nn.Module, mode: Literal["frozen"] | int | None, *, is_new: bool) -> None:
    """Freeze the model's batch norms, or have them normalise over groups of `mode` samples.

    By default those of pre-trained weights are frozen; a new model (`is_new`) has no statistics to keep. Raises
    ModelError where the key is missing or has no effect.
    """
    found: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    if not found:
        if mode is not None:
            raise ModelError("model.batch_norm: the model has no batch norm. Remove the key.")
        return
    if mode is None and is_new:
        raise ModelError(
            "model.batch_norm: a new model has no statistics for its batch norms. Write over how "
            "many samples they normalise: a divisor of `train.microbatch_size`, such as 16."
        )
    for name, module in found:
        if mode is None or mode == "frozen":
            module.train = MethodType(_stay_in_evaluation, module)
        elif type(module) not in SUPPORTED_NORMS or module.running_mean is None:
            raise ModelError(
                f"model.batch_norm: {name} is a {type(module).__name__}, which supports only `frozen`. Write that."
            )
        else:
            _replace(model, module, by=GhostBatchNorm(module, group_size=mode))
    model.train(model.training)


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Use the running statistics and never update them, in training too."""
    return type(module).train(module, False)


def _replace(model: nn.Module, module: nn.Module, *, by: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is module:
                setattr(parent, name, by)


@dataclass
class _GroupStatistics:
    """Statistics of a norm since its running statistics were last written."""

    size: int  # samples per group
    sums: Tensor | None = None  # [2, channels]: means and variances, summed over this step's groups
    count: int = 0  # number of groups in this step
    running: Tensor | None = None  # [2, channels]: of this rank, over past steps


class GhostBatchNorm(_BatchNorm):
    """A batch norm over groups of consecutive samples in training.

    Its running statistics are updated once per step, by the mean over all of the step's groups. They are written to the
    buffers by `sync_batch_norm`; until then each rank keeps its own.
    """

    def __init__(self, norm: Any, *, group_size: int) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, device="meta")
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(self, name, buffer)
        self.groups = _GroupStatistics(group_size)
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, [samples, channels, ...]; an incomplete group uses the running statistics."""
        num_samples, size = input.shape[0], self.groups.size
        if not self.training or num_samples % size:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return torch.cat([self._normalised(group) for group in torch.split(input, size)])

    def _normalised(self, group: Tensor) -> Tensor:
        found = torch.zeros_like(_running_statistics(self))
        normalised = functional.batch_norm(group, found[0], found[1], self.weight, self.bias, True, 1.0, self.eps)
        state, found = self.groups, found.float()
        state.sums = found if state.sums is None else state.sums + found
        state.count += 1
        return normalised


def update_running_statistics(model: nn.Module) -> None:
    """Update each norm's running statistics on this rank by those of the step's groups, if there are any.

    Non-finite statistics are ignored: such a step is skipped, too.
    """
    for norm in _ghost_norms(model):
        state = norm.groups
        if state.sums is None:
            continue
        before = _running_statistics(norm).float() if state.running is None else state.running
        momentum = 0.1 if norm.momentum is None else norm.momentum
        after = (1 - momentum) * before + momentum * state.sums / state.count
        state.running = torch.where(after.isfinite(), after, before)
        state.sums, state.count = None, 0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked += 1


def sync_batch_norm(model: nn.Module) -> None:
    """Write the running statistics, averaged over ranks, to the buffers of each. Collective.

    A running mean is linear in its inputs, and all ranks have the same number of groups: so this equals one process.
    """
    update_running_statistics(model)
    moved = [(norm, norm.groups.running) for norm in _ghost_norms(model) if norm.groups.running is not None]
    if not moved:
        return
    flat = distributed.sum_tensor(torch.cat([running.reshape(-1) for _, running in moved])) / distributed.world()
    parts = torch.split(flat, [running.numel() for _, running in moved])
    for (norm, running), part in zip(moved, parts, strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, variance = part.view_as(running)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.groups.running = None


def _ghost_norms(model: nn.Module) -> Iterator[GhostBatchNorm]:
    return (module for module in model.modules() if isinstance(module, GhostBatchNorm))


def _running_statistics(norm: GhostBatchNorm) -> Tensor:
    """Return running mean and variance, [2, channels], as in the buffers."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return torch.stack([norm.running_mean, norm.running_var])
