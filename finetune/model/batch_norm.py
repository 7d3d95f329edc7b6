"""Batch normalization that does not depend on how a step's batch is split into microbatches and ranks.

Standard batch norm normalizes over the microbatch of one rank (Ioffe & Szegedy, 2015, arXiv:1502.03167), so the loss
depends on the number of processes. Here it is either frozen, as is usual in fine-tuning, or normalizes over groups of
consecutive samples of the step (ghost batch normalization: Hoffer et al., 2017, arXiv:1705.08741). The groups do not
depend on the split, as long as every microbatch contains whole groups.
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
"""Modules that only normalize; subclasses may do more."""

_BatchNorm = nn.modules.batchnorm._BatchNorm


def set_batch_norm(model: nn.Module, mode: Literal["frozen"] | int | None, *, is_new: bool) -> None:
    """Freeze the model's batch norms, or make them normalize over groups of `mode` samples.

    The default is to freeze pre-trained batch norms; a new model (`is_new`) has no statistics to keep. Raises
    ModelError if the key is missing or has no effect.
    """
    norms: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    if not norms:
        if mode is not None:
            raise ModelError("model.batch_norm: the model has no batch norm. Remove the key.")
        return
    if mode is None and is_new:
        raise ModelError(
            "model.batch_norm: a new model has no statistics for its batch norms. Write the number of samples to "
            "normalize over: a divisor of `train.microbatch_size`, such as 16."
        )
    for name, module in norms:
        if mode is None or mode == "frozen":
            module.train = MethodType(_stay_in_evaluation, module)
        elif type(module) not in SUPPORTED_NORMS or module.running_mean is None:
            raise ModelError(
                f"model.batch_norm: `{name}` is a {type(module).__name__}, which can only be frozen. Write `frozen`."
            )
        else:
            ghost_norm = GhostBatchNorm(module, group_size=mode)
            for parent in list(model.modules()):
                for child_name, child in list(parent.named_children()):
                    if child is module:
                        setattr(parent, child_name, ghost_norm)
    model.train(model.training)


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stay in evaluation mode: use the running statistics and never update them."""
    return type(module).train(module, False)


@dataclass
class _GroupStatistics:
    """Statistics of a batch norm since its running statistics were last written."""

    size: int  # samples per group
    sums: Tensor | None = None  # [2, channels]: means and variances, summed over this step's groups
    count: int = 0  # number of groups in this step
    running: Tensor | None = None  # [2, channels]: of this rank, over past steps


class GhostBatchNorm(_BatchNorm):
    """A batch norm that normalizes over groups of consecutive samples in training.

    Its running statistics are updated once per step with the mean over the step's groups. `sync_batch_norm` writes them
    to the buffers; until then every rank has its own.
    """

    def __init__(self, norm: Any, *, group_size: int) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, device="meta")
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(self, name, buffer)
        self.groups = _GroupStatistics(group_size)
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, [samples, channels, ...]; an incomplete group uses the running statistics."""
        num_samples, size = input.shape[0], self.groups.size
        if not self.training or num_samples % size:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        outputs = []
        for group in torch.split(input, size):
            moments = torch.zeros_like(
                _running_statistics(self)
            )  # momentum 1: filled with the group's mean and variance
            outputs.append(
                functional.batch_norm(group, moments[0], moments[1], self.weight, self.bias, True, 1.0, self.eps)
            )
            moments = moments.float()
            self.groups.sums = moments if self.groups.sums is None else self.groups.sums + moments
            self.groups.count += 1
        return torch.cat(outputs)


def update_running_statistics(model: nn.Module) -> None:
    """Update the running statistics on this rank with the statistics of the step's groups, if there are any.

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
    """Write the running statistics, averaged over ranks, to the buffers on every rank. Collective.

    A running mean is linear in its inputs and all ranks have the same number of groups, so the result equals that of
    one process.
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
    """Return running mean and variance, [2, channels], in the buffers' dtype."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return torch.stack([norm.running_mean, norm.running_var])
