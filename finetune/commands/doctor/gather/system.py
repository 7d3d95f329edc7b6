"""Processor, memory, limits and kind of this machine."""

import os
import platform
import resource
from pathlib import Path
from typing import Any

import psutil

from finetune.commands.doctor.facts.host import NumaNode, SystemFacts
from finetune.runtime.resources import CGROUPS, file_limit, usable_cores

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))
_UNLIMITED = 1 << 60
"""A limit of cgroup v1 above this is none."""


def gather_system() -> SystemFacts:
    """Return what the kernel tells of the machine."""
    memory, limit, kernel = psutil.virtual_memory(), file_limit(), platform.release().lower()
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
        is_wsl="microsoft" in kernel or "WSL_DISTRO_NAME" in os.environ,
        is_container=any(mark.exists() for mark in _CONTAINER_MARKS) or "container" in os.environ,
        is_virtual=" hypervisor" in _text(Path("/proc/cpuinfo"), at_most=1 << 16),
        iommu=read_iommu(Path("/sys/kernel/iommu_groups")),
        governor=_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        files_soft=limit.soft,
        files_hard=limit.hard,
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        **_battery(),
    )


def read_numa(folder: Path) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have cores."""
    nodes = (
        NumaNode(int(node.name.removeprefix("node")), _text(node / "cpulist")) for node in folder.glob("node[0-9]*")
    )
    return tuple(sorted((node for node in nodes if node.cores), key=lambda node: node.index))


def read_memory_limit(groups: Path, *, total: int) -> int | None:
    """Return the memory that the container may use, by cgroup v2 or v1; None where nothing limits it below `total`."""
    found = [_text(groups / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limits = [int(each) for each in found if each.isdigit() and int(each) < min(total, _UNLIMITED)]
    return min(limits, default=None)


def read_iommu(groups: Path) -> str | None:
    """Return whether devices reach memory through translated addresses: "translated", "passthrough" or "off"."""
    modes = {_text(file) for file in groups.glob("*/type")}
    if any(mode.startswith("DMA") for mode in modes):
        return "translated"
    return "passthrough" if modes else "off"


def _battery() -> dict[str, Any]:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return {"has_battery": battery is not None, "is_plugged_in": getattr(battery, "power_plugged", None)}


def _text(file: Path, *, at_most: int = 4096) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(at_most).strip()
    except OSError:
        return ""
