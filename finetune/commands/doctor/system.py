"""Processor, memory, limits, type (container, WSL, laptop) and disks of a machine, and their effects on a run."""

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.commands.doctor.findings import Finding, Severity, finding
from finetune.commands.doctor.job_facts import JobFacts
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.resources import CGROUPS, file_limit, files_needed, format_size, free_bytes, usable_cores


@dataclass(frozen=True)
class SystemFacts:
    """Processor, memory, limits and type of a machine."""

    platform: str = ""
    num_cores: int = 1
    usable_cores: int = 1
    num_numa_nodes: int = 1
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
    files_soft, files_hard = file_limit()
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return SystemFacts(
        platform=platform.platform(),
        num_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        num_numa_nodes=count_numa_nodes(Path("/sys/devices/system/node")),
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
        files_soft=files_soft,
        files_hard=files_hard,
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
    )


def count_numa_nodes(folder: Path) -> int:
    """Return the number of NUMA nodes that have cores."""
    return sum(bool(_text(node / "cpulist")) for node in folder.glob("node[0-9]*"))


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
    """Yield the limits of memory, cores and files that would affect a run, and effects of battery, governor and WSL.

    `num_ranks` are of this machine.
    """
    limit = facts.memory_limit_bytes
    if limit is not None:
        yield finding("memory-limit", limit=limit, facts=facts)
    available = min(limit or facts.memory_bytes, facts.memory_bytes)
    needed = num_parameters * 4 * num_ranks
    if available and needed > available:
        yield finding(
            "memory-loading", num_ranks=num_ranks, num_parameters=num_parameters, needed=needed, available=available
        )
    share, threads = facts.usable_cores // num_ranks, variables.get("OMP_NUM_THREADS", "")
    if num_gpus and share < _CORES_PER_RANK:
        yield finding("cores-per-rank", num_ranks=num_ranks, facts=facts)
    if threads.isdigit() and int(threads) > max(1, share):
        yield finding("too-many-threads", threads=threads, cores=max(1, share), facts=facts, num_ranks=num_ranks)
    elif threads == "1" and not num_gpus and share > 1:
        yield finding("too-few-threads", share=share)
    is_enough = facts.files_hard >= files_needed(world)
    processes = MANY_PROCESSES if is_enough else world
    files = files_needed(processes)
    if facts.files_hard < files:
        severity = Severity.NOTE if is_enough else Severity.MUST_FIX
        yield finding("open-files", severity=severity, facts=facts, processes=processes, files=files)

    if facts.has_battery and facts.is_plugged_in is False:
        yield finding("on-battery")
    elif facts.has_battery and num_gpus:
        yield finding("laptop")
    if facts.governor == "powersave" and not facts.is_wsl and not facts.has_battery:
        yield finding("governor")
    if facts.is_wsl:
        yield finding("wsl")
        if num_gpus > 1 and variables.get("NCCL_P2P_DISABLE") != "1":
            yield finding("wsl-p2p", num_gpus=num_gpus)


@dataclass(frozen=True)
class Disk:
    """The disk of a folder that a run writes to."""

    name: str  # "run" or "cache"
    folder: str
    free_bytes: int
    filesystem: str = ""
    free_files: int | None = None
    write_bytes_per_second: float | None = None
    is_writable: bool = True


@dataclass(frozen=True)
class StorageFacts:
    """Disks and shared memory."""

    disks: tuple[Disk, ...] = ()
    shared_bytes: int | None = None
    shared_free_bytes: int | None = None


SHARED_MEMORY = Path("/dev/shm")
_PROBE_BYTES = 64 << 20
_PROBE_SECONDS = 1.5
_CHUNK = 4 << 20


def gather_storage(folders: Mapping[str, Path]) -> StorageFacts:
    """Return the disks of these folders, which may not exist yet, and shared memory."""
    disks = []
    mounts = [(Path(partition.mountpoint), partition.fstype) for partition in psutil.disk_partitions(all=True)]
    for name, folder in folders.items():
        path = folder.absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
        above = [(mount, filesystem) for mount, filesystem in mounts if existing.resolve().is_relative_to(mount)]
        files = os.statvfs(existing)
        disk = Disk(
            name=name,
            folder=str(folder),
            free_bytes=free_bytes(folder),
            filesystem=max(above, key=lambda pair: len(pair[0].parts), default=(Path("/"), ""))[1],
            free_files=files.f_favail if files.f_files else None,
            write_bytes_per_second=_write_speed(existing),
            is_writable=os.access(existing, os.W_OK | os.X_OK),
        )
        disks.append(disk)
    if not SHARED_MEMORY.is_dir():
        return StorageFacts(tuple(disks))
    shared = shutil.disk_usage(SHARED_MEMORY)
    return StorageFacts(tuple(disks), shared.total, shared.free)


def _write_speed(folder: Path) -> float | None:
    """Return the bytes per second of writing and syncing a file, for at most 64 MiB or 1.5 s."""
    if free_bytes(folder) < 4 * _PROBE_BYTES or not os.access(folder, os.W_OK | os.X_OK):
        return None
    probe = temporary_path(folder / "doctor-probe")
    chunk = os.urandom(_CHUNK)
    written = 0
    started = time.perf_counter()
    try:
        with probe.open("wb") as file:
            while written < _PROBE_BYTES and time.perf_counter() - started < _PROBE_SECONDS:
                written += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
    finally:
        probe.unlink(missing_ok=True)


FULL_BYTES = 1_000_000_000
"""Free space below which a disk counts as full."""
SMALL_SHARED_BYTES = 1_000_000_000
"""Shared memory below which loader processes may fail to pass on batches; a container's default is 64 MB."""
_FEW_FILES = 10_000
_SLOW_BYTES_PER_SECOND = 100e6
_WINDOWS = ("9p", "drvfs", "v9fs")


def check_storage(facts: StorageFacts, job: JobFacts | None, *, is_wsl: bool, has_many_gpus: bool) -> Iterator[Finding]:
    """Yield the problems of the disks for a run, and of shared memory."""
    for disk in facts.disks:
        yield from _check_disk(disk, job, is_wsl=is_wsl)
        if job is not None:
            if disk.name == "run":
                needed = job.num_checkpoints * job.checkpoint_bytes + job.final_bytes - job.written_bytes
                checkpoints = f"{job.num_checkpoints} checkpoints of {format_size(job.checkpoint_bytes)}"
                parts = f"{checkpoints} and the final model of {format_size(job.final_bytes)}"
                fix = "lower checkpoint.keep_last, or name another folder (run.folder)"
            else:
                needed = job.cache_bytes
                parts = "the prepared rows"
                fix = "name another folder (data.cache_folder), or use data.train.stream"
            if needed > disk.free_bytes:
                yield finding("disk-room", needed=needed, disk=disk, parts=parts, fix=fix)
    shared = facts.shared_bytes
    if shared is None:
        return
    if shared < SMALL_SHARED_BYTES:
        yield finding(
            "shared-memory/small",
            shared=shared,
            why="loader processes pass batches through it"
            + (", and NCCL its buffers: a bus error ends the run" if has_many_gpus else ""),
        )
    elif (facts.shared_free_bytes or 0) < SMALL_SHARED_BYTES / 10:
        yield finding("shared-memory/full", free=facts.shared_free_bytes or 0, shared=shared)


def _check_disk(disk: Disk, job: JobFacts | None, *, is_wsl: bool) -> Iterator[Finding]:
    if not disk.is_writable:
        yield finding("disk-not-writable", disk=disk, key=_key(disk))
    if disk.free_bytes < FULL_BYTES:
        yield finding("disk-full", disk=disk, key=_key(disk))
    if disk.free_files is not None and disk.free_files < _FEW_FILES:
        yield finding("disk-files", disk=disk)
    is_windows = disk.filesystem.startswith(_WINDOWS) or (is_wsl and disk.folder.startswith("/mnt/"))
    if is_windows:
        yield finding("windows-disk", disk=disk, key=_key(disk))
    speed, checkpoint = disk.write_bytes_per_second, job.checkpoint_bytes if job is not None else 0
    if speed is not None and speed < _SLOW_BYTES_PER_SECOND and not is_windows:
        seconds = f": a checkpoint of {format_size(checkpoint)} takes {checkpoint / speed:.0f} s" if checkpoint else ""
        yield finding("disk-slow", disk=disk, speed=speed, seconds=seconds, key=_key(disk))


def _key(disk: Disk) -> str:
    return "run.folder" if disk.name == "run" else "data.cache_folder"
