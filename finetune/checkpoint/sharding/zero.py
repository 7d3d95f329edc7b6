"""The state layout of DeepSpeed ZeRO: flat fp32 partitions, each with consecutive parts of many parameters.

DeepSpeed's own accessors (`safe_get_full_*`) read the same tensors, but need linked optimizer state, which exists
only after the first step, and return the whole tensor on every rank. Seen with DeepSpeed 0.19.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from finetune.checkpoint.sharding.optimizer_state import create_state_by_step, no_learning_rate, zero_gradients
from finetune.checkpoint.sharding.state_layout import (
    ShardView,
    StateLayout,
    named_buffers,
    named_parameters,
    replicated_view,
)
from finetune.checkpoint.upstream import restore_cpu_adam_step, step_zero3_partitions, update_zero3_copies


def zero12_layout(engine: Any) -> StateLayout:
    """Return the layout of ZeRO-1 and -2: parameters replicated, their fp32 master weights partitioned."""
    zero = engine.optimizer
    flats = [group["params"][0] for group in zero.optimizer.param_groups]
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    flat_of = {id(parameter): flat for group, flat in zip(groups, flats, strict=True) for parameter in group}

    def update_copies() -> None:
        zero.update_lp_params()
        restore_cpu_adam_step(zero.optimizer)

    return StateLayout(
        shards={
            name: _zero12_view(parameter, flat_of.get(id(parameter)))
            for name, parameter in named_parameters(engine).items()
        },
        buffers=named_buffers(engine),
        create_optimizer_state=partial(create_state_by_step, zero.optimizer),
        update_model_copies=update_copies,
    )


def zero3_layout(engine: Any) -> StateLayout:
    """Return the layout of ZeRO-3, whose parameters are also partitioned."""
    zero = engine.optimizer

    def create_state() -> None:
        with zero_gradients(zero.fp32_partitioned_groups_flat), no_learning_rate(zero.optimizer):
            step_zero3_partitions(zero)

    def update_copies() -> None:
        update_zero3_copies(zero)
        restore_cpu_adam_step(zero.optimizer)

    return StateLayout(
        shards={name: _zero3_view(parameter, zero) for name, parameter in named_parameters(engine).items()},
        buffers=named_buffers(engine),
        create_optimizer_state=create_state,
        update_model_copies=update_copies,
    )


def _zero12_view(parameter: nn.Parameter, flat: Tensor | None) -> ShardView:
    if flat is None:
        return replicated_view(parameter)
    mapping: Any = getattr(parameter, "_hp_mapping", None)  # None: no element of it is in this rank's partition
    start = mapping.lp_fragment_address.start if mapping is not None else 0
    count = mapping.hp_fragment_address.numel if mapping is not None else 0
    offset = mapping.hp_fragment_address.start if mapping is not None else 0
    return ShardView(
        tensor=flat,
        local_view=_narrow(offset, count),
        shape=tuple(parameter.shape),
        start=start,
        stop=start + count,
        is_trained=True,
        is_replicated=False,
    )


def _zero3_view(parameter: Any, zero: Any) -> ShardView:
    size = parameter.partition_numel()  # the last partition is padded
    start = min(size * zero._get_param_partition_rank(parameter), parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    tensor, offset = parameter.ds_tensor, 0
    position = zero.grad_position.get(zero.get_param_id(parameter)) if parameter.requires_grad else None
    if position is not None:
        tensor, offset = zero.fp32_partitioned_groups_flat[position[0]], position[1]
    return ShardView(
        tensor=tensor,
        local_view=_narrow(offset, stop - start),
        shape=tuple(parameter.ds_shape),
        start=start,
        stop=stop,
        is_trained=position is not None,
        is_replicated=False,
    )


def _narrow(offset: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().reshape(-1).narrow(0, offset, count)
