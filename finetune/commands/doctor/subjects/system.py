"""Processor, memory, limits and type of a machine (container, WSL, laptop), and the resulting restrictions."""

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.commands.doctor.subjects.findings import Finding, must_fix, note, should_fix
from finetune.runtime.resources import CGROUPS, file_limit, files_needed, format_size, usable_cores


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node."""

    index: int
    cores: str


@dataclass(frozen=True)
class SystemFacts:
    """Processor, memory, limits and type of a machine."""

    platform: str = ""
    num_cores: int = 1
    usable_cores: int = 1
    local_processes: int = 1  # launched on this machine
    numa: tuple[NumaNode, ...] = ()
    memory_bytes: int = 0
    available_bytes: int = 0
    memory_limit_bytes: int | None = None  # of the container
    is_wsl: bool = False
    is_container: bool = False
    is_virtual: bool = False
    iommu: str | None = None  # "translated", "passthrough" or "off"
    has_battery: bool = False
    is_plugged_in: bool | None = None
    governor: str | None = None
    files_soft: int = 1 << 30
    files_hard: int = 1 << 30
    locked_memory_bytes: int | None = None  # None: unlimited


_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))

_UNLIMITED = 1 << 60
"""A limit of cgroup v1 above this is not a limit."""


def gather_system() -> SystemFacts:
    """Return the facts that the kernel reports."""
    memory = psutil.virtual_memory()
    limit = file_limit()
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return SystemFacts(
        platform=platform.platform(),
        num_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        numa=read_numa(Path("/sys/devices/system/node")),
        memory_bytes=int(memory.total),
        available_bytes=int(memory.available),
        memory_limit_bytes=read_memory_limit(CGROUPS, total=int(memory.total)),
        is_wsl="microsoft" in platform.release().lower() or "WSL_DISTRO_NAME" in os.environ,
        is_container=any(mark.exists() for mark in _CONTAINER_MARKS) or "container" in os.environ,
        is_virtual=" hypervisor" in _text(Path("/proc/cpuinfo"), at_most=1 << 16),
        iommu=read_iommu(Path("/sys/kernel/iommu_groups")),
        has_battery=battery is not None,
        is_plugged_in=getattr(battery, "power_plugged", None),
        governor=_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        files_soft=limit.soft,
        files_hard=limit.hard,
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
    )


def read_numa(folder: Path) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have cores."""
    nodes = (
        NumaNode(int(node.name.removeprefix("node")), _text(node / "cpulist")) for node in folder.glob("node[0-9]*")
    )
    return tuple(sorted((node for node in nodes if node.cores), key=lambda node: node.index))


def read_memory_limit(groups: Path, *, total: int) -> int | None:
    """Return the memory that the container may use, by cgroup v2 or v1; None without a limit below `total`."""
    texts = [_text(groups / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < min(total, _UNLIMITED)]
    return min(limits, default=None)


def read_iommu(groups: Path) -> str | None:
    """Return the mode in which devices address memory: "translated", "passthrough" or "off"."""
    modes = {_text(file) for file in groups.glob("*/type")}
    if any(mode.startswith("DMA") for mode in modes):
        return "translated"
    return "passthrough" if modes else "off"


def _text(file: Path, *, at_most: int = 4096) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(at_most).strip()
    except OSError:
        return ""


MANY_PROCESSES = 1000

_CORES_PER_RANK = 2


def check_system(
    facts: SystemFacts, variables: Mapping[str, str], *, num_gpus: int, num_ranks: int, world: int, num_parameters: int
) -> Iterator[Finding]:
    """Yield the limits that would affect a run; `num_ranks` are those of this machine."""
    yield from _memory(facts, num_ranks=num_ranks, num_parameters=num_parameters)
    yield from _cores(facts, variables.get("OMP_NUM_THREADS", ""), num_gpus=num_gpus, num_ranks=num_ranks)
    yield from _files(facts, world=world)
    yield from _power(facts, has_gpu=num_gpus > 0)
    if facts.is_wsl:
        yield from _wsl(variables, num_gpus=num_gpus)


def _memory(system: SystemFacts, *, num_ranks: int, num_parameters: int) -> Iterator[Finding]:
    limit = system.memory_limit_bytes
    if limit is not None:
        yield note(
            "memory-limit",
            f"the container may use {format_size(limit)} of the {format_size(system.memory_bytes)} of the machine",
            why="the kernel kills a process that needs more (exit code 137), regardless of the output of `free`",
            fix="docker: --memory; Kubernetes: resources.limits.memory; Slurm: --mem",
        )
    available = min(limit or system.memory_bytes, system.memory_bytes)
    needed = num_parameters * 4 * num_ranks
    if available and needed > available:
        yield should_fix(
            "memory-loading",
            f"{num_ranks} ranks that each load {num_parameters:,} parameters in float32 need {format_size(needed)} of "
            f"host memory; the machine has {format_size(available)}",
            why="the run is killed while it loads the model",
            fix="launch FSDP2 with fsdp_cpu_ram_efficient_loading: true, or ZeRO-3: both load on rank 0 or in parts",
        )


def _cores(system: SystemFacts, threads: str, *, num_gpus: int, num_ranks: int) -> Iterator[Finding]:
    share = system.usable_cores // num_ranks
    if num_gpus and share < _CORES_PER_RANK:
        yield should_fix(
            "cores-per-rank",
            f"{num_ranks} ranks share {system.usable_cores} cores",
            why="each rank needs one core to launch kernels and another to load data",
            fix="request more (docker: --cpus; Slurm: --cpus-per-task), and write data.num_workers: 0",
        )
    if threads.isdigit() and int(threads) > max(1, share):
        yield should_fix(
            "too-many-threads",
            f"OMP_NUM_THREADS={threads}, and a rank has {max(1, share)} cores ({system.usable_cores} for {num_ranks})",
            why="threads that share a core wait for each other: CPU work becomes several times slower",
            fix=f"export OMP_NUM_THREADS={max(1, share)}",
        )
    elif threads == "1" and not num_gpus and share > 1:
        yield note(
            "too-few-threads",
            f"OMP_NUM_THREADS=1, and each rank has {share} cores",
            why="torchrun sets it to 1 for several processes; training on the CPU then uses one core",
            fix=f"export OMP_NUM_THREADS={share}",
        )


def _files(system: SystemFacts, *, world: int) -> Iterator[Finding]:
    needed, is_enough = files_needed(world), system.files_hard >= files_needed(world)
    if is_enough and system.files_hard >= files_needed(MANY_PROCESSES):
        return
    processes = MANY_PROCESSES if is_enough else world
    finding = note if is_enough else must_fix
    needed = files_needed(processes)
    yield finding(
        "open-files",
        f"a process may open {system.files_hard:,} files and sockets (`ulimit -Hn`), and a run of {processes:,} "
        f"processes needs {needed:,}",
        why="connections to other ranks are refused: `Too many open files`",
        fix=f"raise the hard limit (docker: --ulimit nofile={needed}; Slurm: PropagateResourceLimits; else "
        "/etc/security/limits.conf)",
    )


def _power(system: SystemFacts, *, has_gpu: bool) -> Iterator[Finding]:
    if system.has_battery and system.is_plugged_in is False:
        yield should_fix(
            "on-battery",
            "the machine runs on battery",
            why="processor and GPU run at a fraction of their speed, and the run ends when the battery is empty",
            fix="plug it in, and set the power mode to performance (`powerprofilesctl set performance`)",
        )
    elif system.has_battery and has_gpu:
        yield note(
            "laptop",
            "this is a laptop",
            why="its GPU has less power than the desktop card and slows down with heat; suspend ends a run",
            fix="systemd-inhibit python -m finetune --config job.yaml   # and save often: checkpoint.every_steps",
        )
    if system.governor == "powersave" and not system.is_wsl and not system.has_battery:
        yield note(
            "governor",
            "the cores' frequency governor is powersave",
            why="on some processors they stay at a low clock, and the GPU waits for its kernels to be launched",
            fix="sudo cpupower frequency-set -g performance",
        )


def _wsl(variables: Mapping[str, str], *, num_gpus: int) -> Iterator[Finding]:
    yield note(
        "wsl",
        "this is WSL2",
        why="the GPU is shared with the Windows desktop; pinned memory is limited; there is neither NVLink nor P2P; "
        "Linux has half of the memory by default",
        fix="data.pin_memory: false where pinning fails; memory= and swap= in %UserProfile%\\.wslconfig; "
        "export LD_LIBRARY_PATH=/usr/lib/wsl/lib if libcuda is not found; do not install a Linux driver",
    )
    if num_gpus > 1 and variables.get("NCCL_P2P_DISABLE") != "1":
        yield should_fix(
            "wsl-p2p",
            f"WSL2 with {num_gpus} GPUs",
            why="WSL2 does not support P2P, and NCCL may hang when it tries",
            fix="export NCCL_P2P_DISABLE=1",
        )
