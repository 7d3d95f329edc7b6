"""What `accelerate launch` would have set, set in a process that already runs: one strategy after another."""

import gc
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

ROOT = Path(__file__).parents[3]
RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""What the controller has set, and nobody else is to."""


@contextmanager
def environment_of(strategy: str) -> Iterator[None]:
    """Set what the launcher would set for the strategy's file in accelerate_configs/; take it back afterwards.

    `NAME, groups of N` is the file NAME with tensor parallelism of N.
    """
    before, (name, _, size) = dict(os.environ), strategy.partition(", groups of ")
    config = ROOT / "accelerate_configs" / f"{name}.yaml"
    os.environ.update(launch_variables(config, world=before["WORLD_SIZE"], tensor_size=size))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch_variables(config: Path, *, world: str, tensor_size: str = "") -> Mapping[str, str]:
    """Return the variables that `accelerate launch` sets in a process for the config file."""
    words = ["--config_file", str(config), "--num_processes", world, "--main_process_port", "0"]
    words += ["--parallelism_config_tp_size", tensor_size] if tensor_size else []
    arguments: Namespace
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "script.py"]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        found = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in found.items() if name not in RANK and os.environ.get(name) != value}


@contextmanager
def gloo_for(strategy: str | None) -> Iterator[None]:
    """Have Trainer build FSDP and DeepSpeed on CPUs, over gloo: Accelerate itself would fall back to one process."""
    if strategy in (None, "ddp"):
        yield
        return
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    with patch.object(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)):
        yield


def world_size() -> int:
    """Return the number of this competitor's processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def forget_accelerator() -> None:
    """Have the next Accelerator built anew, on the same process group where there is one. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=False)
    PartialState._reset_state()
    gc.collect()
