"""Versions of what computes and compiles, locks of killed builds, and the variables that steer a run."""

import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.commands.doctor.facts.host import Lock, SoftwareFacts
from finetune.commands.doctor.gather.tools import run_tool
from finetune.config.yaml import read_yaml
from finetune.runtime.environment import default_config, launcher_variables, nccl_version, package_versions
from finetune.runtime.text.redact import redacted_variables
from finetune.runtime.upstream import build_locks, extensions_folder
from finetune.strategy.cpu_adam import build_tools, missing_for_cpu_adam

_MORE_VARIABLES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "TRANSFORMERS_OFFLINE", "OPENBLAS_NUM_THREADS"),
    *("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"),
    *("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "CXX", "WSL_DISTRO_NAME"),
)
_VERSION = re.compile(r"release (\d+\.\d+)")
_ACCELERATE_KEYS = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu", "gpu_ids")


def gather_software() -> SoftwareFacts:
    """Return versions, tools and locks."""
    tools, default = build_tools(), default_config(os.environ)
    return SoftwareFacts(
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()),
        num_torch_devices=torch.cuda.device_count(),
        nccl=nccl_version(),
        compatibility_library=loaded_compatibility_library(),
        compiler=tools.compiler,
        nvcc=_found(nvcc_version),
        has_ninja=tools.has_ninja,
        missing_for_cpu_adam=missing_for_cpu_adam() if find_spec("deepspeed") is not None else None,
        locks=tuple(Lock(str(each.path), each.state, str(each)) for each in build_locks(extensions_folder())),
        accelerate_config=default["path"] if default["exists"] else None,
        accelerate_settings=read_accelerate_settings(Path(default["path"])) if default["exists"] else {},
    )


def gather_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that steer libraries, without secrets; empty ones count."""
    more = {name: variables[name] for name in _MORE_VARIABLES if name in variables}
    return launcher_variables(variables) | redacted_variables(more)


def nvcc_version() -> str | None:
    """Return the version of the nvcc that torch would take, `12.4`; raises OSError where there is none."""
    nvcc = build_tools().nvcc
    found = _VERSION.search(run_tool([nvcc, "--version"])) if nvcc is not None else None
    return None if found is None else found[1]


def read_accelerate_settings(file: Path) -> dict[str, str]:
    """Return the settings of the default accelerate config that decide where and how a job runs."""
    try:
        content: Any = read_yaml(file.read_text(encoding="utf-8")).values
    except Exception:  # of the file or of its YAML: `accelerate launch` says more about it
        return {}
    return {key: str(content[key]) for key in _ACCELERATE_KEYS if isinstance(content, dict) and key in content}


def loaded_compatibility_library() -> str | None:
    """Return the libcuda of a `cuda-compat` package that this process has loaded; None for the driver's own."""
    if torch.version.cuda is None:
        return None
    maps = (each.path for each in psutil.Process().memory_maps())
    return next((path for path in maps if "libcuda.so" in path and "compat" in path), None)


def _found(function: Callable[[], str | None]) -> str | None:
    try:
        return function()
    except OSError:
        return None
