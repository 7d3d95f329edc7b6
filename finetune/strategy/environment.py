"""The launcher's settings for this process, read from environment variables."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import StrategyError
from finetune.strategy.unsupported import unsupported_by_environment


@dataclass(frozen=True)
class LaunchEnvironment:
    """The settings of `accelerate launch` or torchrun, if any, for this process."""

    world: int = 1
    rank: int = 0
    has_device: bool = False  # an accelerator that torch can use
    has_process_group: bool = False  # started by a launcher, possibly as the only process
    is_fsdp: bool = False
    zero_stage: int | None = None  # None: no DeepSpeed
    replicate_size: int = 1  # HSDP: copies of the sharded model
    shard_size: int = 1  # HSDP: the setting for the processes that share one copy
    sequence_size: int = 1  # consecutive processes that share the tokens of every row
    tensor_size: int = 1  # consecutive processes that share the matrices of every layer
    precision: str = "no"  # of the accelerate config; `no` leaves it to the job
    fsdp_activation_checkpointing: bool = False
    fsdp_forward_prefetch: bool = False
    fsdp_offload_params: bool = False
    cpu_ram_efficient_loading: bool = False
    unsupported: tuple[str, ...] = ()  # a message for each setting that is not supported
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # the DeepSpeed config file, as written


def read_environment(variables: Mapping[str, str], *, has_device: bool) -> LaunchEnvironment:
    """Return the launcher's settings; raises StrategyError for a DeepSpeed config file that cannot be read."""
    deepspeed = _deepspeed_file(variables)
    zero_stage: int | None = None
    if is_true(variables, "ACCELERATE_USE_DEEPSPEED"):
        in_file = deepspeed.get("zero_optimization", {}).get("stage")
        zero_stage = int(in_file if in_file is not None else variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return LaunchEnvironment(
        world=int(variables.get("WORLD_SIZE", "1")),
        rank=int(variables.get("RANK", "0")),
        has_device=has_device,
        has_process_group="LOCAL_RANK" in variables,
        is_fsdp=is_true(variables, "ACCELERATE_USE_FSDP"),
        zero_stage=zero_stage,
        replicate_size=int(variables.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")),
        shard_size=int(variables.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")),
        sequence_size=int(variables.get("PARALLELISM_CONFIG_SP_SIZE", "1")),
        tensor_size=int(variables.get("PARALLELISM_CONFIG_TP_SIZE", "1")),
        precision=variables.get("ACCELERATE_MIXED_PRECISION", "no"),
        fsdp_activation_checkpointing=is_true(variables, "FSDP_ACTIVATION_CHECKPOINTING"),
        fsdp_forward_prefetch=is_true(variables, "FSDP_FORWARD_PREFETCH"),
        fsdp_offload_params=is_true(variables, "FSDP_OFFLOAD_PARAMS"),
        cpu_ram_efficient_loading=is_true(variables, "FSDP_CPU_RAM_EFFICIENT_LOADING"),
        unsupported=unsupported_by_environment(variables, deepspeed),
        deepspeed=deepspeed,
    )


def require_launcher(variables: Mapping[str, str]) -> None:
    """Raise StrategyError for a strategy of several processes in one that no launcher has started.

    The variables are left over from a shell or a notebook that `accelerate launch` has started, or from a container.
    """
    flags = [name for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED") if is_true(variables, name)]
    if not flags or "LOCAL_RANK" in variables:
        return
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    rest = sorted(name for name in variables if name.startswith(prefixes) and name not in flags)
    raise StrategyError(
        f"{flags[0]}={variables[flags[0]]} is set in the environment, but no launcher has started this process: there "
        f"are no processes to shard over. For one process: unset {' '.join([*flags, *rest])}. For several, start with "
        "--accelerate FILE --processes N or `accelerate launch`."
    )


def is_true(variables: Mapping[str, str], name: str) -> bool:
    """Return whether the launcher has set this variable to true."""
    return variables.get(name, "false").lower() in ("true", "1", "yes")


def _deepspeed_file(variables: Mapping[str, str]) -> Mapping[str, Any]:
    name = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if not is_true(variables, "ACCELERATE_USE_DEEPSPEED") or name == "none":
        return {}
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"the DeepSpeed config {name} cannot be read ({error}). `deepspeed_config_file` in the accelerate config "
            f"is relative to the folder in which you launch, {Path.cwd()}, or to that of the accelerate file."
        ) from error
    if not isinstance(content, dict):
        raise StrategyError(f"the DeepSpeed config {name} is not a JSON object.")
    return content
