"""Refuses contradictions between the job and the accelerate config."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import StrategyError
from finetune.registry.model_choices import ARITHMETIC
from finetune.registry.optimizers import OPTIMIZERS
from finetune.strategy.environment import TENSOR, LaunchEnvironment, may_split_layers


@dataclass(frozen=True)
class JobSettings:
    """The settings of the job that a strategy depends on."""

    strategy: str | None  # run.strategy: the only one that is accepted
    precision: str  # fp32, bf16, fp16, fp8
    microbatch_size: int
    max_gradient_norm: float | None
    optimizer: str = "adamw"
    averages_weights: bool = False  # of the weights, in the optimizer
    unfreezes_later: bool = False  # some parameters are trained only after a number of steps
    pins_memory: bool = False
    offloads_activations: bool = False
    updates_in_backward: bool = False
    emulates_fp8: bool = False
    rounds_by_position: bool = False  # stochastic rounding, seeded by the position in the whole parameter


def find_conflicts(environment: LaunchEnvironment, job: JobSettings) -> list[str]:
    """Return a sentence for each contradiction between the accelerate config and the job."""
    conflicts = []
    required = ARITHMETIC[job.precision].mixed_precision
    if environment.precision not in ("no", required):
        conflicts.append(
            f"the accelerate config sets mixed_precision: {environment.precision}, but the job sets train.precision: "
            f"{job.precision}. Set `mixed_precision: 'no'` in the accelerate config."
        )
    if job.precision == "fp16" and not environment.has_device:
        conflicts.append("train.precision: fp16 needs a GPU, but this machine has none. Set fp32 or bf16.")
    if job.precision == "fp8" and environment.zero_stage is not None:
        conflicts.append(
            "train.precision: fp8 does not work under ZeRO, which flattens weights and casts them itself. Launch with "
            "accelerate_configs/fsdp2.yaml or ddp.yaml, or set bf16."
        )
    if job.precision == "fp8" and not environment.has_device and not job.emulates_fp8:
        conflicts.append(
            "train.precision: fp8 needs a GPU of compute capability 8.9 or newer, but this machine has none. Set bf16, "
            "or `train.fp8.emulate: true`, which computes the same numbers slowly."
        )
    if job.pins_memory and not environment.has_device:
        conflicts.append("data.pin_memory: true has no effect on a machine without a GPU. Remove it.")
    if environment.fsdp_activation_checkpointing:
        conflicts.append(
            "fsdp_activation_checkpointing: true gives wrong gradients with any dropout (seen with Accelerate 1.15). "
            "Set it to false, and model.gradient_checkpointing: true in the job."
        )
    if environment.is_fsdp and environment.fsdp_offload_params and not environment.has_device:
        conflicts.append("fsdp_offload_params: true has no effect on a machine without a GPU. Set it to false.")
    conflicts += environment.unsupported
    conflicts += _size_conflicts(environment)
    return conflicts + _optimizer_conflicts(environment, job) + _deepspeed_conflicts(environment, job)


def _size_conflicts(environment: LaunchEnvironment) -> list[str]:
    """Return a sentence for sizes of `parallelism_config` that the processes cannot have."""
    world, rows, layers = environment.world, environment.sequence_size, environment.tensor_size
    copies, shards = environment.replicate_size, environment.shard_size
    sizes = {"dp_replicate_size": copies, "dp_shard_size": shards, "sp_size": rows, "tp_size": layers}
    product = math.prod(sizes.values())
    is_divided = product in (rows, layers) and product > 0 and world % product == 0  # the rest is data parallel
    if product != world and not is_divided:
        listed = " x ".join(f"{name}: {size}" for name, size in sizes.items() if size != 1)
        return [
            f"parallelism_config: {listed} is for {product} processes, and {world} were started. Change the sizes in "
            "the accelerate file."
        ]
    engine = "fsdp" if environment.is_fsdp else None if environment.zero_stage is None else "zero"
    if not may_split_layers(layers, world=world, copies=copies, rows=rows, engine=engine):
        return [TENSOR.sentence(f"parallelism_config: tp_size: {layers} on {world} processes")]
    if layers > 1 and environment.fsdp_offload_params:
        return [
            f"fsdp_offload_params: true is not supported with parallelism_config: tp_size: {layers}: layers are split "
            "on the device. Set it to false."
        ]
    return []


def _optimizer_conflicts(environment: LaunchEnvironment, job: JobSettings) -> list[str]:
    conflicts = []
    if job.offloads_activations and not environment.has_device:
        conflicts.append("model.activation_offload: true has no effect on a machine without a GPU. Remove it.")
    shards = environment.is_fsdp or environment.zero_stage is not None
    if job.updates_in_backward and (shards or environment.world > 1):
        conflicts.append(
            "train.optimizer.in_backward: true works on one process only: on several, a gradient is complete only "
            "after it has been reduced. Remove it, or start one process without FSDP and DeepSpeed."
        )
    if environment.zero_stage is not None and OPTIMIZERS[job.optimizer].needs_matrices:
        conflicts.append(
            f"train.optimizer.name: {job.optimizer} needs whole matrices, but ZeRO passes flattened "
            "shards to the optimizer. Launch with accelerate_configs/ddp.yaml or fsdp2.yaml, or set adamw."
        )
    if shards and environment.world > 1 and not OPTIMIZERS[job.optimizer].has_divisible_state:
        conflicts.append(
            f"train.optimizer.name: the state of {job.optimizer} cannot be saved while parameters are sharded. Launch "
            "with accelerate_configs/ddp.yaml, or set adamw, which has `state_dtype: int8`."
        )
    if environment.zero_stage is not None and job.rounds_by_position:
        conflicts.append(
            "train.optimizer.state_dtype and stochastic_rounding need whole rows, but ZeRO passes "
            "flattened shards to the optimizer. Launch with accelerate_configs/ddp.yaml or fsdp2.yaml, or remove them."
        )
    return conflicts


def _deepspeed_conflicts(environment: LaunchEnvironment, job: JobSettings) -> list[str]:
    if environment.zero_stage is None:
        return []
    conflicts = []
    if environment.zero_stage == 0:
        conflicts.append("ZeRO stage 0 shards nothing. Launch with accelerate_configs/ddp.yaml.")
    for key, value in _set_by_job(environment.world, job).items():
        written = environment.deepspeed.get(key, "auto")
        if written != "auto" and written != value:
            conflicts.append(
                f"the DeepSpeed config sets {key}: {written}, but the job requires {value}. Set `auto` in that file."
            )
    conflicts += [
        f"the DeepSpeed config has a section `{section}`, which only the job may set. Remove it from that file."
        for section in ("optimizer", "scheduler")
        if section in environment.deepspeed
    ]
    conflicts += [
        f"the DeepSpeed config sets {precision}.enabled: true, but the job sets train.precision: {job.precision}. "
        "Set `auto` in that file."
        for precision in ("bf16", "fp16")
        if environment.deepspeed.get(precision, {}).get("enabled") is True and job.precision != precision
    ]
    if offloads_optimizer(environment.deepspeed) and not OPTIMIZERS[job.optimizer].may_be_offloaded:
        conflicts.append(
            f"an offloaded optimizer must be adamw (DeepSpeedCPUAdam), but the job sets {job.optimizer}. Set adamw."
        )
    used = {"train.average": job.averages_weights, "train.unfreeze": job.unfreezes_later}
    return conflicts + [
        f"{key} is not supported with an offloaded optimizer (DeepSpeedCPUAdam). Launch without offload_optimizer, "
        f"or remove {key}."
        for key, is_used in used.items()
        if is_used and offloads_optimizer(environment.deepspeed)
    ]


def complete_deepspeed_config(config: Mapping[str, Any], *, world: int, job: JobSettings) -> dict[str, Any]:
    """Return DeepSpeed's config completed by the job's settings.

    Accumulation is 1: the step sets the boundary itself. Clipping is set even if it is off, since Accelerate would
    otherwise clip at 1.0. Under bf16, gradients are reduced in fp32 and checked before an update.
    """
    filled = {**config, **_set_by_job(world, job), "zero_allow_untested_optimizer": True}
    filled["bf16"] = {**config.get("bf16", {}), "enabled": job.precision == "bf16"}
    filled["fp16"] = {**config.get("fp16", {}), "enabled": job.precision == "fp16"}
    if job.precision == "bf16":
        filled["bf16"]["check_grad_overflow"] = True
        filled["communication_data_type"] = "fp32"
        filled["data_types"] = {"grad_accum_dtype": "fp32"}
    return filled


def refuse_conflicts(strategy: str, environment: LaunchEnvironment, job: JobSettings) -> None:
    """Raise StrategyError with every conflict; do nothing when there is none."""
    conflicts = find_conflicts(environment, job)
    if job.strategy not in (None, strategy):
        conflicts.insert(
            0,
            f"the job sets run.strategy: {job.strategy}, but {strategy} was launched. "
            f"Launch with --config_file accelerate_configs/{job.strategy}.yaml, or change run.strategy.",
        )
    if conflicts:
        count = len(conflicts)
        lines = "\n".join(f"  {line}" for line in conflicts)
        raise StrategyError(
            f"the job and the accelerate config contradict each other in {count} point{'s' * (count > 1)}\n{lines}"
        )


def _set_by_job(world: int, job: JobSettings) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": job.microbatch_size,
        "gradient_accumulation_steps": 1,
        "train_batch_size": job.microbatch_size * world,
        "gradient_clipping": job.max_gradient_norm or 0.0,
    }


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Return whether this DeepSpeed config offloads the optimizer to the CPU."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    return str(offload.get("device", "none")) != "none"
