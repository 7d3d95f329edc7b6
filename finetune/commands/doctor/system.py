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

from finetune.commands.doctor.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.job import JobFacts
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.resources import CGROUPS, file_limit, files_needed, format_size, free_bytes, usable_cores


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


def gather() -> SystemFacts:
    """Return the facts that the kernel reports."""
    memory = psutil.virtual_memory()
    files_soft, files_hard = file_limit()
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
        files_soft=files_soft,
        files_hard=files_hard,
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


def check(
    facts: SystemFacts, variables: Mapping[str, str], *, num_gpus: int, num_ranks: int, world: int, num_parameters: int
) -> Iterator[Finding]:
    """Yield the limits of memory, cores and open files that would affect a run; `num_ranks` are of this machine."""
    limit = facts.memory_limit_bytes
    if limit is not None:
        yield note(
            "memory-limit",
            f"the container may use {format_size(limit)} of the {format_size(facts.memory_bytes)} of the machine",
            why="the kernel kills a process that needs more (exit code 137), regardless of the output of `free`",
            fix="docker: --memory; Kubernetes: resources.limits.memory; Slurm: --mem",
        )
    available = min(limit or facts.memory_bytes, facts.memory_bytes)
    needed = num_parameters * 4 * num_ranks
    if available and needed > available:
        yield should_fix(
            "memory-loading",
            f"{num_ranks} ranks that each load {num_parameters:,} parameters in float32 need {format_size(needed)} of "
            f"host memory; the machine has {format_size(available)}",
            why="the run is killed while it loads the model",
            fix="launch FSDP2 with fsdp_cpu_ram_efficient_loading: true, or ZeRO-3: both load on rank 0 or in parts",
        )
    share, threads = facts.usable_cores // num_ranks, variables.get("OMP_NUM_THREADS", "")
    if num_gpus and share < _CORES_PER_RANK:
        yield should_fix(
            "cores-per-rank",
            f"{num_ranks} ranks share {facts.usable_cores} cores",
            why="each rank needs one core to launch kernels and another to load data",
            fix="request more (docker: --cpus; Slurm: --cpus-per-task), and write data.num_workers: 0",
        )
    if threads.isdigit() and int(threads) > max(1, share):
        yield should_fix(
            "too-many-threads",
            f"OMP_NUM_THREADS={threads}, and a rank has {max(1, share)} cores ({facts.usable_cores} for {num_ranks})",
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
    is_enough = facts.files_hard >= files_needed(world)
    processes = MANY_PROCESSES if is_enough else world
    files = files_needed(processes)
    if facts.files_hard < files:
        finding = note if is_enough else must_fix
        yield finding(
            "open-files",
            f"a process may open {facts.files_hard:,} files and sockets (`ulimit -Hn`), and a run of {processes:,} "
            f"processes needs {files:,}",
            why="connections to other ranks are refused: `Too many open files`",
            fix=f"raise the hard limit (docker: --ulimit nofile={files}; Slurm: PropagateResourceLimits; else "
            "/etc/security/limits.conf)",
        )


def check_machine_type(facts: SystemFacts, variables: Mapping[str, str], *, num_gpus: int) -> Iterator[Finding]:
    """Yield the effects of a laptop's battery, of the governor of its cores, and of WSL."""
    if facts.has_battery and facts.is_plugged_in is False:
        yield should_fix(
            "on-battery",
            "the machine runs on battery",
            why="processor and GPU run at a fraction of their speed, and the run ends when the battery is empty",
            fix="plug it in, and set the power mode to performance (`powerprofilesctl set performance`)",
        )
    elif facts.has_battery and num_gpus:
        yield note(
            "laptop",
            "this is a laptop",
            why="its GPU has less power than the desktop card and slows down with heat; suspend ends a run",
            fix="systemd-inhibit python -m finetune --config job.yaml   # and save often: checkpoint.every_steps",
        )
    if facts.governor == "powersave" and not facts.is_wsl and not facts.has_battery:
        yield note(
            "governor",
            "the cores' frequency governor is powersave",
            why="on some processors they stay at a low clock, and the GPU waits for its kernels to be launched",
            fix="sudo cpupower frequency-set -g performance",
        )
    if facts.is_wsl:
        yield note(
            "wsl",
            "this is WSL2",
            why="the GPU is shared with the Windows desktop; pinned memory is limited; there is neither NVLink nor "
            "P2P; Linux has half of the memory by default",
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
                yield must_fix(
                    "disk-room",
                    f"the job will write another {format_size(needed)} to the {disk.name} folder {disk.folder} "
                    f"({parts}), and {format_size(disk.free_bytes)} are free",
                    why="the run stops at the checkpoint that no longer fits",
                    fix=fix,
                )
    shared = facts.shared_bytes
    if shared is None:
        return
    if shared < SMALL_SHARED_BYTES:
        yield should_fix(
            "shared-memory",
            f"/dev/shm has only {format_size(shared)}",
            why="loader processes pass batches through it"
            + (", and NCCL its buffers: a bus error ends the run" if has_many_gpus else ""),
            fix="give the container more (docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium "
            "Memory), or write data.num_workers: 0",
        )
    elif (facts.shared_free_bytes or 0) < SMALL_SHARED_BYTES / 10:
        yield note(
            "shared-memory",
            f"/dev/shm is full ({format_size(facts.shared_free_bytes or 0)} of {format_size(shared)} free)",
            why="loader processes and NCCL cannot allocate their buffers",
            fix="ls -la /dev/shm; delete the files of killed processes (nccl-*, torch_*)",
        )


def _check_disk(disk: Disk, job: JobFacts | None, *, is_wsl: bool) -> Iterator[Finding]:
    if not disk.is_writable:
        yield must_fix(
            "disk-not-writable",
            f"the {disk.name} folder {disk.folder} cannot be written by this user",
            why="the run stops at its start",
            fix=f"sudo chown $USER {disk.folder}, or name another folder ({_key(disk)})",
        )
    if disk.free_bytes < FULL_BYTES:
        yield must_fix(
            "disk-full",
            f"the disk of the {disk.name} folder {disk.folder} has {format_size(disk.free_bytes)} left",
            why="neither prepared data nor a checkpoint can be written",
            fix=f"free some space (`finetune checkpoint prune RUN`, `du -xsh {disk.folder}/*`), or name another folder "
            f"({_key(disk)})",
        )
    if disk.free_files is not None and disk.free_files < _FEW_FILES:
        yield must_fix(
            "disk-files",
            f"the disk of the {disk.name} folder {disk.folder} has only {disk.free_files:,} free inodes",
            why="writing fails with `No space left on device` despite free bytes",
            fix="delete small files (`df -i` shows the count)",
        )
    is_windows = disk.filesystem.startswith(_WINDOWS) or (is_wsl and disk.folder.startswith("/mnt/"))
    if is_windows:
        yield should_fix(
            "windows-disk",
            f"the {disk.name} folder {disk.folder} is on a Windows disk",
            why="each file access crosses from WSL to Windows, ten times slower; renames and locks are not reliable",
            fix=f"name a folder in the Linux file system, such as ~/runs ({_key(disk)})",
        )
    speed, checkpoint = disk.write_bytes_per_second, job.checkpoint_bytes if job is not None else 0
    if speed is not None and speed < _SLOW_BYTES_PER_SECOND and not is_windows:
        seconds = f": a checkpoint of {format_size(checkpoint)} takes {checkpoint / speed:.0f} s" if checkpoint else ""
        yield should_fix(
            "disk-slow",
            f"the {disk.name} folder {disk.folder} ({disk.filesystem}) writes only {format_size(round(speed))}/s",
            why=f"saving and preparing data wait for it{seconds}",
            fix=f"name a folder on a local SSD ({_key(disk)})",
        )


def _key(disk: Disk) -> str:
    return "run.folder" if disk.name == "run" else "data.cache_folder"
