"""The Accelerator of a run: how it is built, and how it prepares a model and an optimizer."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.errors import StrategyError, UserError
from finetune.memory.state import PredictMemory
from finetune.model.kernels import float8
from finetune.model.upstream import expose_hidden_size, head_as_one_unit
from finetune.registry.model_choices import ARITHMETIC
from finetune.report.reporter import RunLog
from finetune.runtime import distributed, seeds
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import open_sequence_groups, open_tensor_groups, sequence_group, tensor_group
from finetune.runtime.upstream import bound_primitive_cache
from finetune.strategy.gradient_sync import keep_experts_in_graph, set_zero3_leaf_modules
from finetune.strategy.protocol import ExpectedSetup, Strategy
from finetune.strategy.upstream import (
    broadcast_rank_0_buffers,
    complete_zero_config,
    drop_not_yet_unfrozen_from_zero_norm,
    keep_bf16_parameters,
    keep_ddp_buffers_local,
    prefetch_fsdp2_layers,
    reduce_zero_buckets_in_place,
    set_default_group_timeout,
    widen_unfilled_parameters,
    without_accelerate_parallelism,
    without_accelerate_splitting,
)
from finetune.task.model_inputs import unwrap_model
from finetune.task.router_loss import Router


def build_accelerator(strategy: Strategy, *, precision: str, timeout: timedelta) -> Accelerator:
    """Return the Accelerator of the strategy; raises StrategyError if Accelerate built another one. Collective.

    `timeout` is that of every process group over which tensors are sent. Accelerate's own accumulation stays at 1: the
    step sets the boundary, from the number of targets.
    """
    set_default_group_timeout(timeout)
    with (
        distributed.reported_wait(),
        strategy.accelerator_context(timeout=timeout),
        without_accelerate_parallelism(),
    ):
        plugin = strategy.plugin()
        handlers = [InitProcessGroupKwargs(timeout=timeout), *plugin.pop("kwargs_handlers", ())]
        accelerator = Accelerator(
            mixed_precision=ARITHMETIC[precision].mixed_precision,
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            dataloader_config=DataLoaderConfiguration(
                even_batches=False, split_batches=False, dispatch_batches=False, non_blocking=True
            ),
            kwargs_handlers=handlers,
            **plugin,
        )
    open_sequence_groups(strategy.expected.sequence_size)
    open_tensor_groups(
        strategy.expected.tensor_size, device_type=accelerator.device.type, mesh=accelerator.torch_device_mesh
    )
    distributed.open_group(distributed.Group.HOST)
    distributed.open_group(distributed.Group.BACKGROUND)  # now: it needs the store, which ends with the launcher
    check_accelerator(accelerator, strategy.expected, precision=precision, strategy=strategy.name)
    return accelerator


def own_batches(accelerator: Accelerator, loader: DataLoader[Any]) -> Iterable[Batch]:
    """Return this rank's microbatches of the world's, in host memory; ranks that share rows or layers get the same."""
    own: Iterable[Batch]
    group = tensor_group() if tensor_group().size > 1 else sequence_group()
    if group.size == 1:
        own = accelerator.prepare_data_loader(loader, device_placement=False)
        return own
    own = prepare_data_loader(
        loader, num_processes=group.num_groups, process_index=group.number, put_on_device=False, even_batches=False
    )
    return own


def check_accelerator(accelerator: Accelerator, expected: ExpectedSetup, *, precision: str, strategy: str) -> None:
    """Raise StrategyError naming every difference between the Accelerator and what was requested."""
    state = accelerator.state
    differences = [
        _difference("distributed type", expected.distributed_types, accelerator.distributed_type.name),
        _difference("number of processes", (expected.num_processes,), accelerator.num_processes),
        _difference("processes in the process group", (expected.num_processes,), distributed.world()),
        _difference("mixed precision", (ARITHMETIC[precision].mixed_precision,), accelerator.mixed_precision),
    ]
    if "FSDP" in expected.distributed_types and state.fsdp_plugin is not None:
        differences.append(_difference("FSDP version", (2,), state.fsdp_plugin.fsdp_version))
    if expected.zero_stage is not None and state.deepspeed_plugin is not None:
        differences.append(_difference("ZeRO stage", (expected.zero_stage,), int(state.deepspeed_plugin.zero_stage)))
    _refuse(differences, strategy)


def check_prepared(model: nn.Module, expected: ExpectedSetup, *, strategy: str) -> None:
    """Raise StrategyError unless the prepared model has the strategy's class and ZeRO stage."""
    names = {cls.__name__ for cls in type(model).__mro__}
    differences: list[str | None] = []
    if expected.model_class is not None and expected.model_class not in names:
        differences.append(f"model: requested {expected.model_class}, got {type(model).__name__}")
    stage: Any = getattr(model, "zero_optimization_stage", None)
    if expected.zero_stage is not None and stage is not None:
        differences.append(_difference("engine's ZeRO stage", (expected.zero_stage,), int(stage())))
    _refuse(differences, strategy)


def _difference(name: str, requested: tuple[Any, ...], got: object) -> str | None:
    return None if got in requested else f"{name}: requested {requested[0]}, got {got}"


def _refuse(differences: list[str | None], strategy: str) -> None:
    lines = [line for line in differences if line is not None]
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise StrategyError(
            f"{strategy} was launched, but Accelerate built something else:\n{listed}\n"
            "Compare the accelerate config with the one of that name in accelerate_configs/."
        )


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
    requested = None if config.train.tf32 == "auto" else config.train.tf32
    if set_tf32(requested, accelerator.device, is_deterministic=config.run.deterministic):
        log("tf32: on, products of float32 matrices have 10 bits of mantissa (`train.tf32: false` for all 23)")
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


def set_tf32(requested: bool | None, device: torch.device, *, is_deterministic: bool) -> bool:
    """Switch TensorFloat-32 on or off for this process, and return whether it is on.

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
    is_on = is_supported and (not is_deterministic if requested is None else requested)
    if is_supported:
        torch.set_float32_matmul_precision("high" if is_on else "highest")
        torch.backends.cudnn.allow_tf32 = is_on
    return is_on


def has_tf32(device: torch.device) -> bool:
    """Return whether the device is a GPU with TF32."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= MIN_TF32_CAPABILITY
