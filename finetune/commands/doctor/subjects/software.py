"""Software versions: whether the driver fits torch and DeepSpeed can compile, and stale locks of builds."""

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

from finetune.commands.doctor.subjects.findings import Finding, has_severe, must_fix, note, should_fix
from finetune.commands.doctor.subjects.gpus import Gpu, GpuFacts
from finetune.commands.doctor.subjects.tools import run_tool
from finetune.config.yaml import read_yaml
from finetune.runtime.environment import default_config, nccl_version, package_versions
from finetune.runtime.upstream import ABANDONED, BUILDING, build_locks, extensions_folder
from finetune.strategy.cpu_adam import build_tools, missing_for_cpu_adam


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
    nvcc = None
    with suppress(OSError):
        nvcc = nvcc_version()
    return SoftwareFacts(
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()),
        num_torch_devices=torch.cuda.device_count(),
        nccl=nccl_version(),
        compatibility_library=loaded_compatibility_library(),
        compiler=tools.compiler,
        nvcc=nvcc,
        has_ninja=tools.has_ninja,
        missing_for_cpu_adam=missing_for_cpu_adam() if find_spec("deepspeed") is not None else None,
        locks=tuple(Lock(str(lock.path), lock.state, str(lock)) for lock in build_locks(extensions_folder())),
        accelerate_config=default["path"] if default["exists"] else None,
        accelerate_settings=read_accelerate_settings(Path(default["path"])) if default["exists"] else {},
    )


def nvcc_version() -> str | None:
    """Return the version of the nvcc that torch would use, `12.4`; raises OSError if it does not run."""
    nvcc = build_tools().nvcc
    match = _VERSION.search(run_tool([nvcc, "--version"])) if nvcc is not None else None
    return None if match is None else match[1]


def read_accelerate_settings(file: Path) -> dict[str, str]:
    """Return the settings of the default accelerate config that affect the launch of a job."""
    try:
        content: Any = read_yaml(file.read_text(encoding="utf-8")).values
    except Exception:  # of the file or of its YAML: `accelerate launch` explains it
        return {}
    return {key: str(content[key]) for key in _ACCELERATE_KEYS if isinstance(content, dict) and key in content}


def loaded_compatibility_library() -> str | None:
    """Return the libcuda of a `cuda-compat` package that this process has loaded; None for the driver's own."""
    if torch.version.cuda is None:
        return None
    maps = (mapped.path for mapped in psutil.Process().memory_maps())
    return next((path for path in maps if "libcuda.so" in path and "compat" in path), None)


_WHEELS = ((13, 0), (12, 8), (12, 6))
"""Versions of CUDA for which download.pytorch.org has builds of torch, the newest first."""

OLDEST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest driver for each major version of CUDA (CUDA's release notes, "minor version compatibility")."""


def check_drivers(gpus: GpuFacts, software: SoftwareFacts, *, is_hidden: bool) -> Iterator[Finding]:
    """Yield the reasons why torch cannot use the GPUs; `is_hidden`: CUDA_VISIBLE_DEVICES hides them all."""
    if gpus.problem is not None:
        yield must_fix(
            "driver",
            f"the NVIDIA driver does not answer: {gpus.problem}",
            why="no process can use a GPU until it does",
            fix="reboot after an update of the driver, or `sudo modprobe nvidia`; then `nvidia-smi` must list the GPUs",
        )
    if not gpus.gpus and not (gpus.has_driver and gpus.problem is None):
        return
    if software.torch_cuda is None:
        yield must_fix(
            "torch-build",
            f"this machine has an NVIDIA driver, but torch {software.packages.get('torch', '')} is a build for CPUs",
            why="every rank would train on the CPU",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}",
        )
        return
    misfits = list(_driver_version(gpus, software.torch_cuda, software.compatibility_library))
    yield from misfits
    for gpu in gpus.gpus:
        yield from _architecture(gpu, software.torch_architectures)
    is_explained = has_severe(misfits) or is_hidden
    if gpus.gpus and software.num_torch_devices == 0 and not is_explained:
        yield must_fix(
            "torch-sees-no-gpu",
            f"NVML lists {len(gpus.gpus)} GPUs, and torch sees none",
            why="every rank would train on the CPU",
            fix="python -c 'import torch; torch.cuda.init()' prints the reason; start a container with --gpus all",
        )
    if len(gpus.gpus) > 1 and software.num_torch_devices and software.nccl is None:
        yield must_fix(
            "nccl",
            "this build of torch has no NCCL",
            why="the GPUs of several ranks cannot communicate",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}",
        )


def _driver_version(gpus: GpuFacts, torch_cuda: str, compatibility: str | None) -> Iterator[Finding]:
    required, offered = _numbers(torch_cuda), _numbers(gpus.driver_cuda or "")
    if not offered:
        return
    text = f"torch is built for CUDA {torch_cuda}, the driver {gpus.driver} runs CUDA up to {gpus.driver_cuda}"
    if compatibility is not None and any("GeForce" in gpu.name for gpu in gpus.gpus):
        yield must_fix(
            "forward-compatibility",
            f"{text}; {compatibility} is loaded",
            why="forward compatibility exists only on data center GPUs: CUDA fails with error 804 on GeForce",
            fix="remove the folder of that file from LD_LIBRARY_PATH",
        )
    elif required[0] > offered[0] and compatibility is None:
        newest = OLDEST_DRIVERS.get(required[0], "a newer one")
        yield must_fix(
            "driver-too-old",
            text,
            why="a driver does not run a newer major version of CUDA: torch.cuda.is_available() is False",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}; or install driver "
            f"{newest} or newer; or, on data center GPUs, `apt-get install cuda-compat-{required[0]}-{required[1]}`",
        )
    elif required > offered and compatibility is None:
        yield note(
            "driver-minor-version",
            text,
            why="it runs (minor version compatibility), but kernels that come as PTX fail with `unsupported toolchain`",
            fix="install a newer driver if a kernel fails that way",
        )
    elif compatibility is not None and offered >= required:
        yield should_fix(
            "forward-compatibility",
            f"{text}; {compatibility} is loaded nevertheless",
            why="the older libcuda of the container replaces the driver's own",
            fix="remove the folder of that file from LD_LIBRARY_PATH",
        )


def _architecture(gpu: Gpu, architectures: tuple[str, ...]) -> Iterator[Finding]:
    if gpu.capability is None or not architectures or runs_on(gpu.capability, architectures):
        return
    yield must_fix(
        "architecture",
        f"GPU {gpu.index} ({gpu.name}) is sm_{gpu.capability[0]}{gpu.capability[1]}, and torch is compiled for "
        f"{', '.join(architectures)}",
        why="kernels fail with `no kernel image is available for execution on the device`",
        fix="install a build of torch for another CUDA: cu128 or cu130 for new GPUs, cu126 for old ones "
        "(https://pytorch.org/get-started)",
    )


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
        finding = note if lock.state == BUILDING else must_fix
        yield finding(
            "build-lock",
            lock.text.rstrip("."),
            why="torch waits for this file to disappear, silently and without a time limit",
            fix=_lock_fix(lock),
        )
    if software.missing_for_cpu_adam is not None:
        yield should_fix(
            "compiler",
            f"ZeRO with an offloaded optimizer (zero2_offload, zero3_offload) cannot start: "
            f"{software.missing_for_cpu_adam.partition('. Run ')[0].rstrip('.')}",
            why="DeepSpeed compiles its Adam for the CPU at the first run on a machine; nothing else needs it",
            fix=software.missing_for_cpu_adam.partition("Run ")[2].strip("`. ") or "apt-get install g++ ninja-build",
        )
    nvcc, cuda = software.nvcc, software.torch_cuda
    if nvcc is not None and cuda is not None and nvcc.split(".")[0] != cuda.split(".")[0]:
        toolkit = cuda.replace(".", "-")
        yield should_fix(
            "nvcc",
            f"nvcc belongs to CUDA {nvcc}, and torch is built for CUDA {cuda}",
            why="DeepSpeed refuses to compile its extensions (CUDAMismatchException)",
            fix=f"apt-get install cuda-toolkit-{toolkit} && export CUDA_HOME=/usr/local/cuda-{cuda}",
        )
    if software.accelerate_config is not None:
        yield from _accelerate_config(software, num_gpus=num_gpus)


def _lock_fix(lock: Lock) -> str:
    if lock.state == BUILDING:
        return "wait until it has compiled"
    return f"rm {lock.path}" + ("   # or launch under DeepSpeed, which removes it" if lock.state == ABANDONED else "")


def _accelerate_config(software: SoftwareFacts, *, num_gpus: int) -> Iterator[Finding]:
    path, settings = software.accelerate_config, software.accelerate_settings
    wrong = []
    if num_gpus and settings.get("use_cpu", "").lower() in ("true", "yes"):
        wrong.append("use_cpu: true, on a machine with GPUs")
    if num_gpus > 1 and settings.get("num_processes") == "1":
        wrong.append(f"num_processes: 1, on a machine with {num_gpus} GPUs")
    if settings.get("mixed_precision", "no") not in ("no", "null", "None", "False"):
        wrong.append(f"mixed_precision: {settings['mixed_precision']}, which train.precision decides")
    if settings.get("num_machines", "1") not in ("1", "0"):
        wrong.append(f"num_machines: {settings['num_machines']}")
    finding = should_fix if wrong else note
    yield finding(
        "accelerate-config",
        f"{path} exists{', with ' if wrong else ''}{'; '.join(wrong)}",
        why="`accelerate launch` reads it unless --config_file names another",
        fix="accelerate launch --config_file accelerate_configs/ddp.yaml -m finetune --config job.yaml; or delete it",
    )
