"""How a run accumulates the gradients of a step's microbatches: by the memory that its ranks have left."""

import os

import torch

from finetune.run.context import RunContext
from finetune.runtime import distributed
from finetune.runtime.resources import available_bytes
from finetune.strategy.gradient_sync import Accumulation, GradientReduction, choose_accumulation

GRADIENT_BYTES = 4
"""Bytes per trained parameter of a gradient that is accumulated before it is reduced: float32."""


def plan_accumulation(
    context: RunContext, device: torch.device, *, num_trained: int, num_batches: int, planned_bytes: int
) -> Accumulation:
    """Return how the gradients of `num_batches` microbatches are accumulated, and log why. Collective.

    `planned_bytes` is what weights, gradients and optimizer state will take on each rank. All ranks decide by the one
    with the least memory.
    """
    reduction = context.strategy.reduction()
    left = 0
    if reduction is GradientReduction.EITHER and num_batches > 1:
        left = min(distributed.gather_objects(free_bytes(device))) - planned_bytes
    found = choose_accumulation(
        reduction,
        num_batches=num_batches,
        num_processes=context.strategy.expected().num_processes,
        unsharded_bytes=GRADIENT_BYTES * num_trained,
        free_bytes=left,
        is_deterministic=context.config.run.deterministic,
        has_bf16_shards=context.config.train.optimizer.stochastic_rounding,
    )
    if found.reason is not None and context.config.train.microbatch_size != "auto":
        context.log(found.reason)
    return found


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on its device; 0 where the device does not tell."""
    if device.type == "cpu":
        return available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
