"""Versions of software and drivers, locks of builds, and environment variables that silently change a run."""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.commands.doctor.findings import Finding, Severity, finding, has_severe, run_tool
from finetune.commands.doctor.gpus import GpuFacts
from finetune.config.yaml import read_yaml
from finetune.runtime.environment import default_config, launcher_variables, nccl_version, package_versions
from finetune.runtime.text.redact import redacted_variables
from finetune.runtime.upstream import BUILDING, build_locks, extensions_folder
from finetune.strategy.choose import build_tools, missing_for_cpu_adam


@dataclass(frozen=True)
class Lock:
    """A lock of a build of DeepSpeed's extensions."""

    path: str
    state: str
    text: str


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions, compilers, and the locks of builds."""

    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None  # None: a build for CPUs
    torch_architectures: tuple[str, ...] = ()  # ("sm_80", "sm_90")
    num_torch_devices: int = 0
    nccl: str | None = None
    compatibility_library: str | None = None  # libcuda of a cuda-compat package, if it is used
    compiler: str | None = None
    nvcc: str | None = None
    has_ninja: bool = True
    missing_for_cpu_adam: str | None = None
    locks: tuple[Lock, ...] = ()
    accelerate_config: str | None = None  # the default file, if it exists
    accelerate_settings: Mapping[str, str] = field(default_factory=dict)


_VERSION = re.compile(r"release (\d+\.\d+)")
_ACCELERATE_KEYS = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu", "gpu_ids")


def gather_software() -> SoftwareFacts:
    """Return versions, tools and locks."""
    tools = build_tools()
    default = default_config(os.environ)
    maps = [mapped.path for mapped in psutil.Process().memory_maps()] if torch.version.cuda is not None else []
    compatibility = [path for path in maps if "libcuda.so" in path and "compat" in path]
    nvcc = None  # the version of the one that torch would use
    if tools.nvcc is not None:
        with suppress(OSError):
            nvcc = next(iter(_VERSION.findall(run_tool([tools.nvcc, "--version"]))), None)
    return SoftwareFacts(
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()),
        num_torch_devices=torch.cuda.device_count(),
        nccl=nccl_version(),
        compatibility_library=next(iter(compatibility), None),
        compiler=tools.compiler,
        nvcc=nvcc,
        has_ninja=tools.has_ninja,
        missing_for_cpu_adam=missing_for_cpu_adam() if find_spec("deepspeed") is not None else None,
        locks=tuple(Lock(str(lock.path), lock.state, str(lock)) for lock in build_locks(extensions_folder())),
        accelerate_config=default["path"] if default["exists"] else None,
        accelerate_settings=read_accelerate_settings(Path(default["path"])) if default["exists"] else {},
    )


def read_accelerate_settings(file: Path) -> dict[str, str]:
    """Return the settings of the default accelerate config that affect the launch of a job."""
    try:
        content: Any = read_yaml(file.read_text(encoding="utf-8")).values
    except Exception:  # of the file or of its YAML: `accelerate launch` explains it
        return {}
    return {key: str(content[key]) for key in _ACCELERATE_KEYS if isinstance(content, dict) and key in content}


_WHEELS = ((13, 0), (12, 8), (12, 6))
"""Versions of CUDA for which download.pytorch.org has builds of torch, the newest first."""

OLDEST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest driver for each major version of CUDA (CUDA's release notes, "minor version compatibility")."""


def check_drivers(gpus: GpuFacts, software: SoftwareFacts, *, is_hidden: bool) -> Iterator[Finding]:
    """Yield the reasons why torch cannot use the GPUs; `is_hidden`: CUDA_VISIBLE_DEVICES hides them all."""
    if gpus.problem is not None:
        yield finding("driver", gpus=gpus)
    if not gpus.gpus and not (gpus.has_driver and gpus.problem is None):
        return
    if software.torch_cuda is None:
        yield finding("torch-build", torch=software.packages.get("torch", ""), wheel=_wheel(gpus))
        return
    misfits = list(_driver_version(gpus, software.torch_cuda, software.compatibility_library))
    yield from misfits
    architectures = software.torch_architectures
    for gpu in gpus.gpus:
        if gpu.capability is not None and architectures and not runs_on(gpu.capability, architectures):
            yield finding("architecture", gpu=gpu, architectures=architectures)
    is_explained = has_severe(misfits) or is_hidden
    if gpus.gpus and software.num_torch_devices == 0 and not is_explained:
        yield finding("torch-sees-no-gpu", num_gpus=len(gpus.gpus))
    if len(gpus.gpus) > 1 and software.num_torch_devices and software.nccl is None:
        yield finding("nccl", wheel=_wheel(gpus))


def _driver_version(gpus: GpuFacts, torch_cuda: str, compatibility: str | None) -> Iterator[Finding]:
    required, offered = _numbers(torch_cuda), _numbers(gpus.driver_cuda or "")
    if not offered:
        return
    text = f"torch is built for CUDA {torch_cuda}, the driver {gpus.driver} runs CUDA up to {gpus.driver_cuda}"
    if compatibility is not None and any("GeForce" in gpu.name for gpu in gpus.gpus):
        yield finding("forward-compatibility/geforce", text=text, compatibility=compatibility)
    elif required[0] > offered[0] and compatibility is None:
        newest = OLDEST_DRIVERS.get(required[0], "a newer one")
        yield finding("driver-too-old", text=text, wheel=_wheel(gpus), newest=newest, required=required)
    elif required > offered and compatibility is None:
        yield finding("driver-minor-version", text=text)
    elif compatibility is not None and offered >= required:
        yield finding("forward-compatibility/replaced", text=text, compatibility=compatibility)


def runs_on(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether kernels for one of the architectures, or PTX for an older one, run on such a GPU.

    >>> runs_on((8, 9), ("sm_80", "sm_90")), runs_on((12, 0), ("sm_90",)), runs_on((12, 0), ("compute_90",))
    (True, False, True)
    """
    for architecture in architectures:
        form, _, digits = architecture.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if form == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if form == "compute" and (major, minor) <= capability:
            return True
    return False


def _wheel(gpus: GpuFacts) -> str:
    """Return the newest build of torch that the driver runs."""
    offered = _numbers(gpus.driver_cuda or "13.0")
    newest = next((version for version in _WHEELS if version <= offered), None)
    major, minor = newest or ((12, 6) if offered[0] == 12 else _WHEELS[0])
    return f"cu{major}{minor}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_software(software: SoftwareFacts, *, num_gpus: int) -> Iterator[Finding]:
    """Yield the problems that keep DeepSpeed from compiling, and a default accelerate config."""
    for lock in software.locks:
        severity = Severity.NOTE if lock.state == BUILDING else Severity.MUST_FIX
        yield finding(
            "build-lock",
            severity=severity,
            what=lock.text.rstrip("."),
            fix="wait until it has compiled" if lock.state == BUILDING else f"rm {lock.path}",
        )
    if software.missing_for_cpu_adam is not None:
        yield finding(
            "compiler",
            missing=software.missing_for_cpu_adam.partition(". Run ")[0].rstrip("."),
            fix=software.missing_for_cpu_adam.partition("Run ")[2].strip("`. ") or "apt-get install g++ ninja-build",
        )
    nvcc, cuda = software.nvcc, software.torch_cuda
    if nvcc is not None and cuda is not None and nvcc.split(".")[0] != cuda.split(".")[0]:
        toolkit = cuda.replace(".", "-")
        yield finding("nvcc", nvcc=nvcc, cuda=cuda, toolkit=toolkit)
    path, settings = software.accelerate_config, software.accelerate_settings
    if path is None:
        return
    wrong = []
    if num_gpus and settings.get("use_cpu", "").lower() in ("true", "yes"):
        wrong.append("use_cpu: true, on a machine with GPUs")
    if num_gpus > 1 and settings.get("num_processes") == "1":
        wrong.append(f"num_processes: 1, on a machine with {num_gpus} GPUs")
    if settings.get("mixed_precision", "no") not in ("no", "null", "None", "False"):
        wrong.append(f"mixed_precision: {settings['mixed_precision']}, which train.precision decides")
    if settings.get("num_machines", "1") not in ("1", "0"):
        wrong.append(f"num_machines: {settings['num_machines']}")
    severity = Severity.SHOULD_FIX if wrong else Severity.NOTE
    yield finding(
        "accelerate-config", severity=severity, path=path, prefix=", with " if wrong else "", wrong="; ".join(wrong)
    )


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


_SHOULD, _NOTE = Severity.SHOULD_FIX, Severity.NOTE
_ON, _OFF, _ANY = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), ()

RULES: tuple[tuple[str, tuple[str, ...], Severity, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", _ON, _SHOULD, "each kernel waits for the previous one: training is much slower"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, _SHOULD, "each tensor is allocated by the driver: much slower"),
    ("TORCH_DISTRIBUTED_DEBUG", ("detail",), _SHOULD, "every collective is checked first"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, _SHOULD, "the host waits for every collective"),
    ("NCCL_BLOCKING_WAIT", _ON, _SHOULD, "the host waits for every collective"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, _SHOULD, "a rank that has failed leaves the others hanging"),
    ("NCCL_SHM_DISABLE", _ON, _SHOULD, "GPUs without P2P then communicate over TCP"),
    ("NCCL_ALGO", _ANY, _NOTE, "NCCL no longer chooses the algorithm by size and topology"),
    ("NCCL_PROTO", _ANY, _NOTE, "NCCL no longer chooses the protocol by size and topology"),
    ("NCCL_P2P_LEVEL", _ANY, _NOTE, "NCCL no longer decides by the platform where P2P is used"),
    ("NCCL_DEBUG", ("info", "trace"), _NOTE, "every rank prints pages of lines"),
    ("NVIDIA_TF32_OVERRIDE", _OFF, _SHOULD, "fp32 matrix products do not use TF32, regardless of train.tf32"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _ON, _NOTE, "TF32 is used regardless of train.tf32: losses change"),
    ("TORCHDYNAMO_DISABLE", _ON, _NOTE, "model.compile has no effect"),
    ("TORCH_COMPILE_DISABLE", _ON, _NOTE, "model.compile has no effect"),
    ("CUDA_DEVICE_ORDER", ("fastest_first",), _NOTE, "CUDA's numbers differ from nvidia-smi's"),
    ("PYTORCH_CUDA_ALLOC_CONF", _ANY, _NOTE, "it replaces the allocator settings that a run chooses"),
    ("PYTORCH_ALLOC_CONF", _ANY, _NOTE, "it replaces the allocator settings that a run chooses"),
    ("LD_PRELOAD", _ANY, _NOTE, "its libraries may replace malloc or CUDA"),
)
"""Variables, the values that cause a finding (in lower case; `_ANY`: all but an empty one), and the reasons."""

_LAUNCHER_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
)
"""Set by `accelerate launch` for its processes; in a shell they are left over from another launch."""


def check_variables(variables: Mapping[str, str], gpus: GpuFacts) -> Iterator[Finding]:
    """Yield the variables that should not be set, or have another value."""
    for name, values, severity, why in RULES:
        value = variables.get(name, "")
        if value.lower() in values or (values == _ANY and value):
            yield finding("variable", severity=severity, variable=name, value=value, why=why)
    visible, num_gpus = variables.get("CUDA_VISIBLE_DEVICES"), len(gpus.gpus)
    if visible is not None and (num_gpus or gpus.has_driver):
        numbers = [int(number) for number in re.findall(r"(?:^|,)\s*(-?\d+)\s*(?=,|$)", visible)]
        if visible.strip() == "" or numbers[:1] == [-1]:
            yield finding("visible-devices/hidden", visible=visible, num_gpus=num_gpus)
        elif num_gpus and any(not 0 <= number < num_gpus for number in numbers):
            yield finding(
                "visible-devices/absent",
                visible=visible,
                last=num_gpus - 1,
                all_gpus=",".join(map(str, range(num_gpus))),
            )
        elif len(numbers) < num_gpus and numbers and "LOCAL_RANK" not in variables:
            yield finding("visible-devices/some", visible=visible, num_visible=len(numbers), num_gpus=num_gpus)
    if "LOCAL_RANK" not in variables:
        left = [name for name in (*_LAUNCHER_VARIABLES, "RANK", "WORLD_SIZE", "MASTER_ADDR") if name in variables]
        if left and not any(name.startswith("SLURM_") for name in variables):
            yield finding("launcher-variables", left=left, names=" ".join(left))
    if any(part.startswith("/usr/local/cuda") for part in variables.get("LD_LIBRARY_PATH", "").split(":")):
        yield finding("library-path", variables=variables)
