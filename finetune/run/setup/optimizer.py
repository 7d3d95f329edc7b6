"""The optimizer of a run, and how the gradients of a step's microbatches are accumulated for it."""

import os

import torch

from finetune.config.run_config import RunConfig
from finetune.report.run_log import RunLog
from finetune.runtime import distributed
from finetune.runtime.resources import available_bytes
from finetune.strategy.gradient_sync import Accumulation, GradientReduction, choose_accumulation
from finetune.strategy.protocol import Strategy
from finetune.train.optim.optimizers import build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import NamedParameter, describe_groups

GRADIENT_BYTES = 4
"""Bytes per trained parameter of a gradient that is accumulated before it is reduced: float32."""


def make_optimizer(
    config: RunConfig, named: list[NamedParameter], *, learning_rate: float, log: RunLog
) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters, not yet prepared; its parameter groups are logged."""
    train = config.train
    optimizer = build_optimizer(
        named,
        train.optimizer,
        learning_rate=learning_rate,
        unfreeze=train.unfreeze,
        average=train.average,
        seed=config.run.seed,
    )
    for line in describe_groups(optimizer.param_groups, named):
        log(line)
    if (warning := slow_update_warning(optimizer)) is not None:
        log(warning)
    return optimizer


def plan_accumulation(
    config: RunConfig,
    strategy: Strategy,
    *,
    device: torch.device,
    num_trained: int,
    num_batches: int,
    planned_bytes: int,
    log: RunLog,
) -> Accumulation:
    """Return how the gradients of `num_batches` microbatches are accumulated, and log why. Collective.

    `planned_bytes` is what weights, gradients and optimizer state will take on each rank. All ranks decide by the one
    with the least memory.
    """
    reduction = strategy.reduction()
    free_bytes = 0
    if reduction is GradientReduction.EITHER and num_batches > 1:
        free_bytes = min(distributed.gather_objects(free_device_bytes(device))) - planned_bytes
    accumulation = choose_accumulation(
        reduction,
        num_batches=num_batches,
        num_processes=strategy.expected().num_processes,
        unsharded_bytes=GRADIENT_BYTES * num_trained,
        free_bytes=free_bytes,
        is_deterministic=config.run.deterministic,
        has_bf16_shards=config.train.optimizer.stochastic_rounding,
    )
    if accumulation.reason is not None and config.train.microbatch_size != "auto":
        log(accumulation.reason)
    return accumulation


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on its device; 0 where the device does not report it."""
    if device.type == "cpu":
        return available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
