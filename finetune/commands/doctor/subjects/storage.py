"""The disks that a run writes to, their measured speed, and shared memory."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.commands.doctor.subjects.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.subjects.job import JobFacts
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.resources import format_size, free_bytes


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
    disks = tuple(_disk(name, folder) for name, folder in folders.items())
    if not SHARED_MEMORY.is_dir():
        return StorageFacts(disks)
    shared = shutil.disk_usage(SHARED_MEMORY)
    return StorageFacts(disks, shared.total, shared.free)


def _disk(name: str, folder: Path) -> Disk:
    path = folder.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    files = os.statvfs(existing)
    return Disk(
        name=name,
        folder=str(folder),
        free_bytes=free_bytes(folder),
        filesystem=filesystem_of(existing),
        free_files=files.f_favail if files.f_files else None,
        write_bytes_per_second=_write_speed(existing),
        is_writable=os.access(existing, os.W_OK | os.X_OK),
    )


def filesystem_of(folder: Path) -> str:
    """Return the type of the folder's file system: `ext4`, `nfs4`, `9p`."""
    mounts = [(Path(partition.mountpoint), partition.fstype) for partition in psutil.disk_partitions(all=True)]
    above = [(mount, filesystem) for mount, filesystem in mounts if folder.resolve().is_relative_to(mount)]
    return max(above, key=lambda pair: len(pair[0].parts), default=(Path("/"), ""))[1]


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
            yield from _needed_bytes(disk, job)
    yield from _shared_memory(facts, has_many_gpus=has_many_gpus)


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


def _needed_bytes(disk: Disk, job: JobFacts) -> Iterator[Finding]:
    """Yield a finding if the job writes more than is free."""
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
            f"the job will write another {format_size(needed)} to the {disk.name} folder {disk.folder} ({parts}), and "
            f"{format_size(disk.free_bytes)} are free",
            why="the run stops at the checkpoint that no longer fits",
            fix=fix,
        )


def _shared_memory(facts: StorageFacts, *, has_many_gpus: bool) -> Iterator[Finding]:
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


def _key(disk: Disk) -> str:
    return "run.folder" if disk.name == "run" else "data.cache_folder"
