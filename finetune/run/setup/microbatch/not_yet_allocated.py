"""What a step has in memory that is not there before the first one: optimizer state, and buffers of ZeRO."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.config.run_config import RunConfig
from finetune.config.sections.train import TrainSection
from finetune.model.size import AVERAGE_BYTES, optimizer_state_bytes
from finetune.strategy.protocol import Strategy


def missing_state_bytes(optimizer: Any, train: TrainSection) -> int:
    """Return this rank's bytes of optimizer state that the first step will allocate; 0 where there is any."""
    optimizer = _inner(optimizer)
    if any(isinstance(each, Tensor) and each.dim() for state in optimizer.state.values() for each in state.values()):
        return 0
    return _state_bytes(optimizer, train)


def later_host_bytes(optimizer: Any, config: RunConfig, *, strategy: Strategy) -> int:
    """Return what a run takes of the host's memory beside its steps: checkpoints that are written in the background."""
    if not config.checkpoint.asynchronous:
        return LATER_BYTES
    optimizer = _inner(optimizer)
    whole = _state_bytes(optimizer, config.train) + sum(each.nbytes for each in _trained(optimizer))
    return LATER_BYTES + (whole if strategy.sharded() else whole // strategy.expected().num_processes)


LATER_BYTES = 128 << 20
"""Threads that load and write; what Accelerate imports with the loader (`datasets`, 70 MB); gaps between blocks.

A run of 10 steps with a checkpoint at each was seen to take 92 to 123 MiB of it, without `datasets`.
"""


def _state_bytes(optimizer: Any, train: TrainSection) -> int:
    """Return this rank's bytes of optimizer state."""
    local = _trained(optimizer)
    num_trained = sum(each.numel() for each in local)
    state = optimizer_state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=num_trained,
        trained_bytes=sum(each.nbytes for each in local),
    )
    return state + (AVERAGE_BYTES * num_trained if train.average else 0)


def _trained(optimizer: Any) -> list[Tensor]:
    return [local_tensor(each) for group in optimizer.param_groups for each in group["params"]]


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def zero_buffer_bytes(model: Any) -> int:
    """Return what ZeRO-1 and -2 allocate in a step: the bucket that is reduced, and this rank's gradient in float32."""
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    if zero is None:
        return 0
    partitions: Sequence[Tensor] = getattr(zero, "single_partition_of_fp32_groups", ())
    bucket: int = getattr(zero, "reduce_bucket_size", 0) * next(model.parameters()).element_size()
    return 2 * bucket + sum(4 * each.numel() for each in partitions)


def local_tensor(parameter: Any) -> Tensor:
    """Return the part of the parameter that this rank holds."""
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found
