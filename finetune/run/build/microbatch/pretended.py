"""What a step has in memory that is not there before the first one: optimizer state, and buffers of ZeRO."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.config.sections.train import TrainSection
from finetune.model.size import AVERAGE_BYTES, optimizer_state_bytes


def missing_state_bytes(optimizer: Any, train: TrainSection) -> int:
    """Return this rank's bytes of optimizer state that the first step will allocate; 0 where there is any."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if any(isinstance(each, Tensor) and each.dim() for state in optimizer.state.values() for each in state.values()):
        return 0
    local = [local_tensor(each) for group in optimizer.param_groups for each in group["params"]]
    num_trained = sum(each.numel() for each in local)
    state = optimizer_state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=num_trained,
        trained_bytes=sum(each.nbytes for each in local),
    )
    return state + (AVERAGE_BYTES * num_trained if train.average else 0)


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
