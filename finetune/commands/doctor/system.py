"""Memory, limits, disks and software of a machine."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from finetune.runtime.environment import launcher_variables, nccl_version, package_versions
from finetune.runtime.resources import file_limit, usable_cores
from finetune.runtime.text.redact import redacted_variables
from finetune.runtime.upstream import BUILDING, build_locks, extensions_folder


@dataclass(frozen=True)
class SystemFacts:
    """Cores, memory and limits of a machine."""

    platform: str = ""
    num_cores: int = 1
    usable_cores: int = 1
    memory_bytes: int = 0
    available_bytes: int = 0
    shared_memory_bytes: int | None = None  # of /dev/shm
    max_open_files: int = 1 << 30  # the hard limit


def gather_system() -> SystemFacts:
    """Return the facts that the kernel reports."""
    memory, shared_memory = psutil.virtual_memory(), Path("/dev/shm")
    return SystemFacts(
        platform=platform.platform(),
        num_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=int(memory.total),
        available_bytes=int(memory.available),
        shared_memory_bytes=shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else None,
        max_open_files=file_limit()[1],
    )


@dataclass(frozen=True)
class Disk:
    """The disk of a folder that a run writes to."""

    key: str  # of the job: "run.folder" or "data.cache_folder"
    folder: str
    free_bytes: int


@dataclass(frozen=True)
class Lock:
    """A lock of a build of DeepSpeed's extensions without a known owner."""

    path: str
    text: str


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions, and the locks of builds."""

    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None  # None: a build for CPUs
    num_torch_devices: int = 0
    nccl: str | None = None
    locks: tuple[Lock, ...] = ()


def gather_software() -> SoftwareFacts:
    """Return versions and locks."""
    locks = [lock for lock in build_locks(extensions_folder()) if lock.state != BUILDING]
    return SoftwareFacts(
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        num_torch_devices=torch.cuda.device_count(),
        nccl=nccl_version(),
        locks=tuple(Lock(str(lock.path), str(lock).rstrip(".")) for lock in locks),
    )


_MORE_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "HTTPS_PROXY", "https_proxy", "NO_PROXY")


def gather_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect libraries, without secrets; empty ones are included."""
    more = {name: variables[name] for name in _MORE_VARIABLES if name in variables}
    return launcher_variables(variables) | redacted_variables(more)
