"""Disks and shared memory against what a run writes."""

from collections.abc import Iterator

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import Disk, HostFacts
from finetune.commands.doctor.facts.launch import Facts, JobFacts
from finetune.runtime.resources import format_size

FULL_BYTES = 1_000_000_000
"""Free room below which a disk counts as full."""

SMALL_SHARED_BYTES = 1_000_000_000
"""Shared memory below which loader processes may fail to hand over their batches; a container's default is 64 MB."""

_FEW_FILES = 10_000
_SLOW_BYTES_PER_SECOND = 100e6
_WINDOWS = ("9p", "drvfs", "v9fs")


def check_storage(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what a run would miss on its disks."""
    for disk in host.storage.disks:
        yield from _disk(disk, facts.job, is_wsl=host.system.is_wsl)
    yield from _needed_bytes(host, facts.job)
    yield from _shared_memory(host)


def _disk(disk: Disk, job: JobFacts | None, *, is_wsl: bool) -> Iterator[Finding]:
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
            fix=f"make room (`finetune checkpoint prune RUN`, `du -xsh {disk.folder}/*`), or name another folder "
            f"({_key(disk)})",
        )
    if disk.free_files is not None and disk.free_files < _FEW_FILES:
        yield must_fix(
            "disk-files",
            f"the disk of the {disk.name} folder {disk.folder} has room for {disk.free_files:,} more files (inodes)",
            why="it reports `No space left on device` though it has free bytes",
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
            f"the {disk.name} folder {disk.folder} ({disk.filesystem}) is written at {format_size(round(speed))}/s",
            why=f"saving and preparing data wait for it{seconds}",
            fix=f"name a folder on a local SSD ({_key(disk)})",
        )


def _needed_bytes(host: HostFacts, job: JobFacts | None) -> Iterator[Finding]:
    """Yield where a job writes more than there is room for."""
    if job is None:
        return
    needs = {
        "run": (
            job.num_checkpoints * job.checkpoint_bytes + job.final_bytes - job.written_bytes,
            f"{job.num_checkpoints} checkpoints of {format_size(job.checkpoint_bytes)} and the final model of "
            f"{format_size(job.final_bytes)}",
            "lower checkpoint.keep_last, or name another folder (run.folder)",
        ),
        "cache": (
            job.cache_bytes,
            "the prepared rows",
            "name another folder (data.cache_folder), or use data.train.stream",
        ),
    }
    for disk in host.storage.disks:
        needed, parts, fix = needs.get(disk.name, (0, "", ""))
        if needed > disk.free_bytes:
            yield must_fix(
                "disk-room",
                f"the job still writes {format_size(needed)} to the {disk.name} folder {disk.folder} ({parts}), and "
                f"{format_size(disk.free_bytes)} are free",
                why="the run stops at the checkpoint that no longer fits",
                fix=fix,
            )


def _shared_memory(host: HostFacts) -> Iterator[Finding]:
    shared = host.storage.shared_bytes
    if shared is None:
        return
    uses_it = len(host.gpus.gpus) > 1
    if shared < SMALL_SHARED_BYTES:
        yield should_fix(
            "shared-memory",
            f"/dev/shm has only {format_size(shared)}",
            why="loader processes hand batches over through it"
            + (", and NCCL its buffers: a bus error ends the run" if uses_it else ""),
            fix="start the container with more (docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium "
            "Memory), or write data.num_workers: 0",
        )
    elif (host.storage.shared_free_bytes or 0) < SMALL_SHARED_BYTES / 10:
        yield note(
            "shared-memory",
            f"/dev/shm is full ({format_size(host.storage.shared_free_bytes or 0)} of {format_size(shared)} free)",
            why="loader processes and NCCL cannot allocate their buffers",
            fix="ls -la /dev/shm; delete what killed processes have left (nccl-*, torch_*)",
        )


def _key(disk: Disk) -> str:
    return "run.folder" if disk.name == "run" else "data.cache_folder"
