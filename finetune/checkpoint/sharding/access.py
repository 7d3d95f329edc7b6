"""Builds the state access for what `Accelerator.prepare` returned; the types of its objects decide on the layout."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from finetune.checkpoint.sharding.fsdp import fsdp1_layout, fsdp2_layout
from finetune.checkpoint.sharding.named_state import NamedState
from finetune.checkpoint.sharding.state_access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import StateLayout, named_buffers, named_parameters, unsharded
from finetune.checkpoint.sharding.zero import zero3_layout, zero12_layout
from finetune.errors import CheckpointError

_ELEMENTWISE_OPTIMIZERS = frozenset(
    {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Lion"}
    | {"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion"}
    | {"ScheduleFreeAdamW", "MuonAndAdamW"}
    | {"LowBitAdamW"}  # and a few for each row: it is refused where rows are cut
)
"""Optimizers whose state has a number for each number of the parameter: the only ones that may be cut anywhere."""


def build_access(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> StateAccess:
    """Return access to the state of the prepared model and optimizer.

    Raises CheckpointError at once where this combination could not be saved: the start is the time to hear of it.
    """
    placement = state_layout(model)
    zero = getattr(model, "optimizer", None) if _zero_stage(model) else None
    inner = zero.optimizer if zero is not None else getattr(optimizer, "optimizer", optimizer)
    if not any(held.is_trained for held in placement.held.values()):
        raise CheckpointError("no parameter is trained, so there is nothing to save")
    is_split = any(held.is_trained and not held.is_whole for held in placement.held.values())
    if is_split and type(inner).__name__ not in _ELEMENTWISE_OPTIMIZERS:
        raise CheckpointError(
            f"train.optimizer.name: the state of {type(inner).__name__} cannot be saved free of the strategy while "
            "parameters are split over ranks. Write `adamw` or `sgd`, or launch with accelerate_configs/ddp.yaml."
        )
    return NamedState(
        placement,
        inner,
        device=accelerator.device,
        loss_scale=LossScale(scaler=accelerator.scaler, deepspeed=getattr(zero, "loss_scaler", None)),
    )


def state_layout(model: nn.Module) -> StateLayout:
    """Return where the prepared model's state lies."""
    stage = _zero_stage(model)
    if stage:
        return zero3_layout(model) if stage == 3 else zero12_layout(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return fsdp2_layout(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return fsdp1_layout(model)
    _refuse_zero_stage_0(model)
    held = {name: unsharded(parameter) for name, parameter in named_parameters(model).items()}
    return StateLayout(held=held, buffers=named_buffers(model))


def _zero_stage(model: Any) -> int:
    stage = getattr(model, "zero_optimization_stage", None)
    return int(stage()) if callable(stage) else 0


def _refuse_zero_stage_0(model: Any) -> None:
    """Refuse DeepSpeed without ZeRO in half precision: its fp32 masters are somewhere else again."""
    wrapper = getattr(model, "optimizer", None)
    if wrapper is not None and not isinstance(wrapper, torch.optim.Optimizer):
        raise CheckpointError(f"DeepSpeed stage 0 with {type(wrapper).__name__} cannot be saved. Write stage 1.")
