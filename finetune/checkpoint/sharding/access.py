"""Builds the state access for what `Accelerator.prepare` returned; the types of its objects decide on the layout."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from finetune.checkpoint.sharding.fsdp import fsdp1_layout, fsdp2_layout
from finetune.checkpoint.sharding.named_state import NamedState
from finetune.checkpoint.sharding.state_access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import StateLayout, named_buffers, named_parameters, replicated_view
from finetune.checkpoint.sharding.zero import zero3_layout, zero12_layout
from finetune.errors import CheckpointError

_ELEMENTWISE_OPTIMIZERS = frozenset(
    {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Lion"}
    | {"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion"}
    | {"ScheduleFreeAdamW", "MuonAndAdamW"}
    | {"LowBitAdamW"}  # plus a few per row: it is refused where rows are split
)
"""Optimizers with one state element per parameter element: only their state may be split at any element."""


def build_access(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> StateAccess:
    """Return access to the state of the prepared model and optimizer.

    Raises CheckpointError if this combination cannot be saved, so that a run fails at its start, not at its first save.
    """
    layout = state_layout(model)
    zero = getattr(model, "optimizer", None) if _zero_stage(model) else None
    inner = zero.optimizer if zero is not None else getattr(optimizer, "optimizer", optimizer)
    trained = [shard for shard in layout.shards.values() if shard.is_trained]
    if not trained:
        raise CheckpointError("no parameter is trained, so there is nothing to save")
    is_sharded = not all(shard.is_replicated for shard in trained)
    if is_sharded and type(inner).__name__ not in _ELEMENTWISE_OPTIMIZERS:
        raise CheckpointError(
            f"train.optimizer.name: the state of {type(inner).__name__} cannot be saved while parameters are sharded. "
            "Write `adamw` or `sgd`, or launch with accelerate_configs/ddp.yaml."
        )
    return NamedState(
        layout,
        inner,
        device=accelerator.device,
        loss_scale=LossScale(scaler=accelerator.scaler, deepspeed=getattr(zero, "loss_scaler", None)),
    )


def state_layout(model: nn.Module) -> StateLayout:
    """Return the state layout of the prepared model on this rank."""
    stage = _zero_stage(model)
    if stage:
        return zero3_layout(model) if stage == 3 else zero12_layout(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return fsdp2_layout(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return fsdp1_layout(model)
    _refuse_zero_stage_0(model)
    shards = {name: replicated_view(parameter) for name, parameter in named_parameters(model).items()}
    return StateLayout(shards=shards, buffers=named_buffers(model))


def _zero_stage(model: Any) -> int:
    stage = getattr(model, "zero_optimization_stage", None)
    return int(stage()) if callable(stage) else 0


def _refuse_zero_stage_0(model: Any) -> None:
    """Refuse DeepSpeed stage 0 in half precision, which keeps its fp32 master weights in yet another layout."""
    wrapper = getattr(model, "optimizer", None)
    if wrapper is not None and not isinstance(wrapper, torch.optim.Optimizer):
        raise CheckpointError(f"DeepSpeed stage 0 with {type(wrapper).__name__} cannot be saved. Write stage 1.")
