"""`--accelerate FILE`: what `accelerate launch --config_file FILE` sets for its processes, set within a process.

So torchrun, `srun` or `mpirun` starts the processes, and the file says how the job is spread over them. Functions of
Accelerate (`commands/launch.py` and `utils/launch.py` of 1.15) make the variables; only their choice is repeated here.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.commands import launch
from accelerate.utils import check_cuda_p2p_ib_support

from finetune.errors import StrategyError
from finetune.registry.accelerate_files import find_deepspeed_file
from finetune.runtime.processes import free_loopback_port

_PREFIXES = ("FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_")
_NAMES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_CLIPPING")
"""Variables by which `accelerate launch` chooses a strategy; nobody else sets them."""

_FOR_SINGLE = "ACCELERATE_USE_CPU"
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_THREADS, _PATH = "OMP_NUM_THREADS", "PYTHONPATH"

_NO_GROUP, _SUPPORTED = "NO", ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP", "DEEPSPEED")


def use_launch_file(file: Path) -> list[str]:
    """Set the variables that `accelerate launch` sets for this file, and return messages for the user.

    Raises StrategyError for a file that Accelerate refuses, where the environment contradicts the file,
    and where the file is for another number of processes than were started.
    """
    name = f"--accelerate {file}"
    world, has_ranks = int(os.environ.get("WORLD_SIZE", "1")), "RANK" in os.environ
    set_before = [variable for variable in os.environ if variable.startswith(_PREFIXES) or variable in _NAMES]
    before = {variable: os.environ.pop(variable) for variable in set_before}
    try:
        defaults, variables = _accelerate_variables(file, world=world, name=name)
    finally:
        os.environ.update(before)
    distributed_type = defaults.distributed_type.value
    if distributed_type == _NO_GROUP and world > 1:
        raise StrategyError(f"{name}: distributed_type NO is for one process, and {world} were started.")
    if not has_ranks and not before and defaults.num_processes > 1:
        raise StrategyError(
            f"{name}: num_processes is {defaults.num_processes}, and no launcher has started this process. Add "
            f"--processes {defaults.num_processes}, or start it with: torchrun --nproc-per-node "
            f"{defaults.num_processes} -m finetune ..., or with srun or mpirun."
        )
    problems = [
        f"  {variable} is {value}, the file {'gives ' + variables[variable] if variable in variables else 'sets none'}"
        for variable, value in sorted(before.items())
        if variables.get(variable) != value and not (variable == _FOR_SINGLE and value.lower() == "false")
    ]
    if problems:
        listed = "\n".join(problems)
        raise StrategyError(
            f"{name} contradicts the environment, which `accelerate launch` or a script has set:\n{listed}\n"
            "Start without `accelerate launch`, or leave --accelerate out."
        )
    os.environ.update(variables)
    sentences = use_deepspeed_file(file)
    if not has_ranks and distributed_type != _NO_GROUP:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_loopback_port())}
    if _THREADS in variables:
        torch.set_num_threads(int(variables[_THREADS]))  # torch has read the variable already
    return sentences if before else [*sentences, *_differences(defaults, world=world, name=name)]


def launch_variables(file: Path, *, world: int | None = None) -> dict[str, str]:
    """Return the variables by which a launch with this file would choose its strategy, none of them set here.

    By default it has the file's own number of processes. Raises StrategyError for a file that Accelerate refuses.
    """
    name = f"--accelerate {file}"
    defaults, variables = _accelerate_variables(file, world=world or 1, name=name)
    if world is None:
        world = int(defaults.num_processes)
        _, variables = _accelerate_variables(file, world=world, name=name)
    if defaults.distributed_type.value != _NO_GROUP:
        variables |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    if (written := variables.get(_DEEPSPEED_FILE, "none")) != "none":
        variables[_DEEPSPEED_FILE] = str(find_deepspeed_file(written, accelerate_file=file))
    return variables


def use_deepspeed_file(file: Path | None = None) -> list[str]:
    """Set where the DeepSpeed config is that the accelerate file names, and return a sentence if it is elsewhere.

    Without a file, it is the one that `accelerate launch` was given: read from its command line, where that is visible.
    """
    written = os.environ.get(_DEEPSPEED_FILE, "none")
    if written == "none" or Path(written).is_file():
        return []
    if file is None:
        with suppress(psutil.Error):
            words = pairwise(psutil.Process(os.getppid()).cmdline())
            file = next((Path(value) for word, value in words if word == "--config_file"), None)
    path = find_deepspeed_file(written, accelerate_file=file)
    if str(path) == written:
        return []
    os.environ[_DEEPSPEED_FILE] = str(path)
    return [f"deepspeed_config_file: {written} is not in {Path.cwd()}: reading {path}."]


def is_set_by_accelerate(variables: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` or `--accelerate` has chosen the strategy."""
    return "ACCELERATE_MIXED_PRECISION" in variables


def _accelerate_variables(file: Path, *, world: int, name: str) -> tuple[Any, dict[str, str]]:
    """Return the file as Accelerate reads it, and the variables that it sets to another value than they have."""
    words = ["--config_file", str(file), "--num_processes", str(world), "--num_machines", "1"]
    words += ["--main_process_port", "0", "-m", "finetune"]  # 0: the port of the launcher is in use, rightly
    try:
        options = launch.launch_command_parser().parse_args(words)
        options, defaults, has_precision = launch._validate_launch_command(options)
        distributed_type = getattr(defaults.distributed_type, "value", None)
        if defaults.compute_environment.value != "LOCAL_MACHINE" or distributed_type not in _SUPPORTED:
            raise ValueError(
                f"distributed_type {distributed_type} is not supported here. Supported: {', '.join(_SUPPORTED)}."
            )
        if defaults.mpirun_config:
            raise ValueError("mpirun_config is for `accelerate launch`. Remove it, and start with mpirun itself.")
        if not isinstance(defaults.num_processes, int) or not isinstance(defaults.num_machines, int):
            raise ValueError("num_processes and num_machines must be whole numbers. Write numbers.")
        for section in ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", "fp8_config"):
            if not isinstance(getattr(defaults, section), dict):
                raise ValueError(f"{section} must be a section. Write keys with values.")
        variables: dict[str, str]
        if options.use_deepspeed:
            fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
            options.deepspeed_fields_from_accelerate_config = ",".join(fields)
            variables = launch.prepare_deepspeed_cmd_env(options)[1]
        elif options.use_fsdp or options.multi_gpu:
            variables = launch.prepare_multi_gpu_env(options)
        else:
            variables = launch.prepare_simple_launcher_cmd_env(options)[1]
        if (options.use_deepspeed or options.use_fsdp or options.multi_gpu) and not check_cuda_p2p_ib_support():
            variables = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} | variables
    except Exception as error:  # any error of a damaged file
        has_keys = not isinstance(error, AttributeError)
        reason = str(error) if has_keys else "it has no keys. `accelerate config` writes such a file."
        raise StrategyError(f"{name}: {reason or type(error).__name__}") from error
    set_here = {key: value for key, value in variables.items() if os.environ.get(key) != value and key not in _ADDRESS}
    if str(Path.cwd()) in os.environ.get(_PATH, "").split(os.pathsep):
        set_here.pop(_PATH, None)
    return defaults, set_here


def _differences(defaults: Any, *, world: int, name: str) -> list[str]:
    """Return a sentence with the processes and address of the file where the launcher's differ."""
    here = os.environ
    settings = {
        "num_processes": (defaults.num_processes, world),
        "num_machines": (defaults.num_machines, world // max(1, int(here.get("LOCAL_WORLD_SIZE", world)))),
        "main_process_ip": (defaults.main_process_ip, here.get("MASTER_ADDR")),
        "main_process_port": (defaults.main_process_port, here.get("MASTER_PORT")),
    }
    overruled = [
        f"{key}: {written} (here {actual})"
        for key, (written, actual) in settings.items()
        if None not in (written, actual) and str(written) != str(actual)
    ]
    return [f"{name}: {', '.join(overruled)}. The launcher decides."] if overruled else []
