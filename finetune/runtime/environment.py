"""environment.json: the software, hardware and settings of a run, so that it can be reproduced."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune import __version__
from finetune.runtime.text.redact import redact_known, redacted_command, redacted_variables

PACKAGES = (
    "finetune",
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)
_LAUNCHER_VARIABLE = re.compile(
    r"(ACCELERATE|CUDA|DEEPSPEED|DS|FSDP|GLOO|HF|MASTER|NCCL|PARALLELISM_CONFIG|PYTORCH|SLURM|TOKENIZERS)_.*|TORCH.*"
    r"|((LOCAL|GROUP|ROLE|NODE)_)?RANK|(LOCAL_)?WORLD_SIZE|(OMP|MKL)_NUM_THREADS"
)


def environment_facts() -> dict[str, Any]:
    """Return versions, devices, code state, command line and launcher settings as plain values, without secrets.

    Never raises if git, a GPU or NCCL is missing: they are None.
    """
    name = platform.processor() or platform.machine()
    devices: list[dict[str, Any]] = [{"type": "cpu", "name": name, "num_threads": torch.get_num_threads()}]
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        devices = [{"type": "cuda", "name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
    group = None
    if torch.distributed.is_initialized():
        backend, world = torch.distributed.get_backend(), torch.distributed.get_world_size()
        group = {"backend": backend, "num_processes": world}
    drivers = _command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": devices,
        "cuda": torch.version.cuda,
        "cuda_driver": drivers.splitlines()[0] if drivers else None,
        "nccl": nccl_version(),
        "git": git_state(Path.cwd()),
        "command": redacted_command(sys.argv),
        "launcher": launcher_variables(os.environ),
        "process_group": group,
        "accelerate_default_config": default_config(os.environ),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the results of a run."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions | {"finetune": __version__}  # installed or not


def launcher_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of launchers and libraries that affect a run, sorted, without secret values."""
    chosen = {name: value for name, value in sorted(variables.items()) if _LAUNCHER_VARIABLE.fullmatch(name)}
    return redacted_variables(chosen)


def default_config(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the path of the default config of `accelerate launch`, and whether the file exists."""
    cache = Path(variables.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    folder = Path(variables.get("HF_HOME", str(cache))).expanduser() / "accelerate"
    files = [folder / "default_config.yaml", folder / "default_config.json"]
    existing = [file for file in files if file.is_file()]
    return {"path": str(existing[0] if existing else files[0]), "exists": bool(existing)}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the folder's repository and whether files differ from it; None outside a repository."""
    commit = _command_output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _command_output(["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain"])
    remote = _command_output(["git", "-C", str(folder), "remote", "get-url", "origin"])
    return {
        "commit": commit,
        "is_dirty": None if changes is None else bool(changes),
        "remote": None if remote is None else redact_known(remote),
    }


def nccl_version() -> str | None:
    """Return the version of NCCL that torch uses; None without a GPU."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _command_output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
