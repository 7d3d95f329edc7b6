"""The Accelerator of a run: how it is built, and how it prepares a model and an optimizer."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.errors import UserError
from finetune.memory.state import PredictMemory
from finetune.model.kernels import float8
from finetune.model.upstream import expose_hidden_size, head_as_one_unit
from finetune.report.reporter import RunLog
from finetune.runtime import distributed, seeds
from finetune.runtime.optional import no_op
from finetune.runtime.upstream import bound_primitive_cache
from finetune.strategy.gradient_sync import keep_experts_in_graph, set_zero3_leaf_modules
from finetune.strategy.protocol import Strategy
from finetune.strategy.upstream import (
    broadcast_rank_0_buffers,
    complete_zero_config,
    drop_not_yet_unfrozen_from_zero_norm,
    keep_bf16_parameters,
    keep_ddp_buffers_local,
    prefetch_fsdp2_layers,
    reduce_zero_buckets_in_place,
    widen_unfilled_parameters,
    without_accelerate_splitting,
)
from finetune.task.model_inputs import unwrap_model
from finetune.task.router_loss import Router
from finetune.train.accelerator import build_accelerator, check_prepared


@dataclass(frozen=True)
class PreparedModel:
    """The result of `Accelerator.prepare`. `unwrapped_model` is the model as built; its parameters may be sharded."""

    accelerator: Accelerator
    unwrapped_model: Any
    model: Any
    optimizer: Any
    before_batch: Callable[[Batch], None] = no_op  # called with each batch before its forward pass
    reduces_every_microbatch: bool = False
    memory: PredictMemory | None = None  # of this rank, if it trains
    routers: tuple[Router, ...] = ()  # where a key of the job is about them
    flops_per_token: float | None = None
    parameter_groups: Mapping[str, str] = field(default_factory=dict)  # settings by pattern of names


MIN_TF32_CAPABILITY = (8, 0)
"""The compute capability of the first NVIDIA GPUs with TF32."""


def make_accelerator(config: RunConfig, strategy: Strategy, *, log: RunLog) -> Accelerator:
    """Return the Accelerator of the launched strategy; from here on ranks can communicate. Collective."""
    bound_primitive_cache(os.environ)
    if config.run.deterministic:
        seeds.use_deterministic_kernels()
    timeout = distributed.group_timeout(config.run.hang_after_seconds)
    accelerator = build_accelerator(strategy, precision=config.train.precision, timeout=timeout)
    for line in set_tf32(
        None if config.train.tf32 == "auto" else config.train.tf32,
        accelerator.device,
        is_deterministic=config.run.deterministic,
        is_float32=config.train.precision == "fp32",
    ):
        log(line)
    return accelerator


def prepare_model_and_optimizer(
    config: RunConfig,
    strategy: Strategy,
    *,
    accelerator: Accelerator,
    model: Any,
    optimizer: torch.optim.Optimizer,
) -> tuple[Any, Any]:
    """Return model and optimizer as Accelerate prepares them, checked to be what was launched. Collective."""
    with (
        expose_hidden_size(model.config),
        head_as_one_unit(unwrap_model(model)),
        broadcast_rank_0_buffers(accelerator, model),
        without_accelerate_splitting(accelerator),
        keep_bf16_parameters(accelerator, is_wanted=config.train.optimizer.stochastic_rounding),
    ):
        complete_zero_config(accelerator, model)
        reduce_zero_buckets_in_place(accelerator)
        keep_experts_in_graph(model)
        set_zero3_leaf_modules(accelerator, model)
        is_unfilled = strategy.init_context(accelerator.device).on_meta_device and strategy.expected.tensor_size == 1
        if is_unfilled and config.model.quantization is None:
            widen_unfilled_parameters(accelerator, model)
        if strategy.name == "tp":  # without DDP, which Accelerate puts around any other model
            prepared_model = accelerator.prepare_model(model, evaluation_mode=True)
            prepared_optimizer = accelerator.prepare_optimizer(optimizer)
        else:
            prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    check_prepared(prepared_model, strategy.expected, strategy=strategy.name)
    prefetch_fsdp2_layers(accelerator, prepared_model)
    if config.train.precision == "fp8":
        float8.gather_in_8_bits(prepared_model, prepared_optimizer)
    keep_ddp_buffers_local(prepared_model)
    if config.train.unfreeze:
        drop_not_yet_unfrozen_from_zero_norm(prepared_model)
    return prepared_model, prepared_optimizer


def set_tf32(
    requested: bool | None, device: torch.device, *, is_deterministic: bool, is_float32: bool
) -> Iterator[str]:
    """Switch TensorFloat-32 on or off for this process, and yield what to log.

    TF32 computes products of float32 matrices and convolutions on tensor cores, with 10 bits of mantissa. None: on
    where the GPU has it, off in deterministic runs. Raises UserError if it is requested and the device has none.

    By torch's process-wide switches: `fp32_precision`, which torch 2.9 has for each backend, makes every reader of
    these raise, torch's own compiler included (seen with 2.11 and 2.13).
    """
    is_supported = has_tf32(device)
    if requested and not is_supported:
        raise UserError(
            f"train.tf32: `true` needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, and this run is on "
            f"`{device}`, which has no TF32. Write `auto`, or remove the key."
        )
    if not is_supported:
        return
    is_on = not is_deterministic if requested is None else requested
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    torch.backends.cudnn.allow_tf32 = is_on
    if is_on:
        yield "tf32: on, products of float32 matrices have 10 bits of mantissa (`train.tf32: false` for all 23)"
    elif is_float32:
        reason = "run.deterministic" if requested is None else "train.tf32"
        yield (
            f"tf32: off ({reason}), so products of float32 matrices run at about a sixth of the speed of TF32. "
            "Write `train.tf32: true`, or `train.precision: bf16`."
        )


def has_tf32(device: torch.device) -> bool:
    """Return whether the device is a GPU with TF32."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= MIN_TF32_CAPABILITY
