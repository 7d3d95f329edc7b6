"""Environment variables that silently change a run."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from finetune.commands.doctor.subjects.findings import Finding, Severity, must_fix, note, should_fix
from finetune.commands.doctor.subjects.gpus import GpuFacts
from finetune.runtime.environment import launcher_variables
from finetune.runtime.text.redact import redacted_variables

_MORE_VARIABLES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NVIDIA_TF32_OVERRIDE",
    "TRANSFORMERS_OFFLINE",
    "OPENBLAS_NUM_THREADS",
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "CXX",
    "WSL_DISTRO_NAME",
)


def gather_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect libraries, without secrets; empty ones are included."""
    more = {name: variables[name] for name in _MORE_VARIABLES if name in variables}
    return launcher_variables(variables) | redacted_variables(more)


_TRUE = ("1", "true", "yes", "on")


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


def _is_false(value: str) -> bool:
    return value.lower() in ("0", "false", "no", "off")


def _is_set(value: str) -> bool:
    return value != ""


@dataclass(frozen=True)
class Rule:
    """A variable, the values that cause a finding, and the reason."""

    name: str
    applies: Callable[[str], bool]
    severity: Severity
    why: str


_SHOULD, _NOTE = Severity.SHOULD_FIX, Severity.NOTE

RULES = (
    Rule("CUDA_LAUNCH_BLOCKING", _is_true, _SHOULD, "each kernel waits for the previous one: training is much slower"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_true, _SHOULD, "each tensor is allocated by the driver: much slower"),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", _SHOULD, "every collective is checked first"
    ),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _is_true, _SHOULD, "the host waits for every collective"),
    Rule("NCCL_BLOCKING_WAIT", _is_true, _SHOULD, "the host waits for every collective"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", _is_false, _SHOULD, "a rank that has failed leaves the others hanging"),
    Rule("NCCL_SHM_DISABLE", _is_true, _SHOULD, "GPUs without P2P then communicate over TCP"),
    Rule("NCCL_ALGO", _is_set, _NOTE, "NCCL no longer chooses the algorithm by size and topology"),
    Rule("NCCL_PROTO", _is_set, _NOTE, "NCCL no longer chooses the protocol by size and topology"),
    Rule("NCCL_P2P_LEVEL", _is_set, _NOTE, "NCCL no longer decides by the platform where P2P is used"),
    Rule("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), _NOTE, "every rank prints pages of lines"),
    Rule("NVIDIA_TF32_OVERRIDE", _is_false, _SHOULD, "fp32 matrix products do not use TF32, regardless of train.tf32"),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _is_true, _NOTE, "TF32 is used regardless of train.tf32: losses change"),
    Rule("TORCHDYNAMO_DISABLE", _is_true, _NOTE, "model.compile has no effect"),
    Rule("TORCH_COMPILE_DISABLE", _is_true, _NOTE, "model.compile has no effect"),
    Rule("CUDA_DEVICE_ORDER", lambda value: value == "FASTEST_FIRST", _NOTE, "CUDA's numbers differ from nvidia-smi's"),
    Rule("PYTORCH_CUDA_ALLOC_CONF", _is_set, _NOTE, "it replaces the allocator settings that a run chooses"),
    Rule("PYTORCH_ALLOC_CONF", _is_set, _NOTE, "it replaces the allocator settings that a run chooses"),
    Rule("LD_PRELOAD", _is_set, _NOTE, "its libraries may replace malloc or CUDA"),
)

_LAUNCHER_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
)
"""Set by `accelerate launch` for its processes; in a shell they are left over from another launch."""


def check_variables(variables: Mapping[str, str], gpus: GpuFacts) -> Iterator[Finding]:
    """Yield the variables that should not be set, or have another value."""
    for rule in RULES:
        value = variables.get(rule.name)
        if value is not None and rule.applies(value):
            yield Finding("variable", rule.severity, f"{rule.name}={value} is set", rule.why, f"unset {rule.name}")
    yield from _visible_devices(variables, gpus)
    if "LOCAL_RANK" not in variables:
        left = [name for name in (*_LAUNCHER_VARIABLES, "RANK", "WORLD_SIZE", "MASTER_ADDR") if name in variables]
        if left and not any(name.startswith("SLURM_") for name in variables):
            yield should_fix(
                "launcher-variables",
                f"{', '.join(left)} set in this shell, without a launcher",
                why="they change the strategy, the precision or the number of ranks that a run assumes",
                fix=f"unset {' '.join(left)}",
            )
    if any(part.startswith("/usr/local/cuda") for part in variables.get("LD_LIBRARY_PATH", "").split(":")):
        yield note(
            "library-path",
            f"LD_LIBRARY_PATH={variables['LD_LIBRARY_PATH']}",
            why="that toolkit's libraries (cuBLAS, cuDNN, NCCL) may replace those of torch",
            fix="unset LD_LIBRARY_PATH, unless torch needs it to start",
        )


def _visible_devices(variables: Mapping[str, str], gpus: GpuFacts) -> Iterator[Finding]:
    value, num_gpus = variables.get("CUDA_VISIBLE_DEVICES"), len(gpus.gpus)
    if value is None or not (num_gpus or gpus.has_driver):
        return
    numbers = [int(number) for number in re.findall(r"(?:^|,)\s*(-?\d+)\s*(?=,|$)", value)]
    if value.strip() == "" or numbers[:1] == [-1]:
        yield must_fix(
            "visible-devices",
            f'CUDA_VISIBLE_DEVICES="{value}" hides all {num_gpus} GPUs',
            why="every rank would train on the CPU",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    elif num_gpus and any(not 0 <= number < num_gpus for number in numbers):
        yield must_fix(
            "visible-devices",
            f"CUDA_VISIBLE_DEVICES={value}, but the GPUs are 0 to {num_gpus - 1}",
            why="CUDA silently ignores that number and all that follow it",
            fix=f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(num_gpus)))}",
        )
    elif len(numbers) < num_gpus and numbers and "LOCAL_RANK" not in variables:
        yield note(
            "visible-devices",
            f"CUDA_VISIBLE_DEVICES={value}: {len(numbers)} of {num_gpus} GPUs are used",
            why="the others stay idle, unless another run has them",
            fix="unset CUDA_VISIBLE_DEVICES to use all",
        )
