"""What `accelerate launch` would have set, set in a process that already runs: one after another, any strategy."""

import gc
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from finetune.strategy.upstream import gloo_bridge

ROOT = Path(__file__).parents[2]
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""What the controller has set, and nobody else is to."""


@contextmanager
def launched(strategy: str) -> Iterator[None]:
    """Set what the launcher would set for the strategy's file in accelerate_configs/; take it back afterwards."""
    before = dict(os.environ)
    os.environ.update(launch_variables(ROOT / "accelerate_configs" / f"{strategy}.yaml", world=before["WORLD_SIZE"]))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch_variables(config: Path, *, world: str) -> Mapping[str, str]:
    """Return the variables by which `accelerate launch` tells a process of the config file."""
    told = ["--config_file", str(config), "--num_processes", world, "--main_process_port", "0", "script.py"]
    arguments: Namespace
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(told))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        found = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in found.items() if name not in PLACE and os.environ.get(name) != value}


def on_cpu(strategy: str) -> AbstractContextManager[None]:
    """Return the context in which Accelerate builds FSDP and DeepSpeed on a machine without an accelerator."""
    return nullcontext() if strategy == "ddp" else gloo_bridge()


def forget() -> None:
    """Have the next Accelerator built anew on the same process group. Collective."""
    torch.distributed.barrier()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=False)
    PartialState._reset_state()
    gc.collect()
