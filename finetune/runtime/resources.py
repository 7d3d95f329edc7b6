"""Cores, memory, disk space and open files that this process may use, within its container. Imports no torch.

Errors of a full or read-only disk become one error that names the free space.
"""

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from finetune.errors import FULL, FinetuneError, disk_text, system_error


def format_size(num_bytes: int) -> str:
    """Return a size in decimal units.

    >>> format_size(1_200_000_000), format_size(363_900)
    ('1.2 GB', '363.9 kB')
    """
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own_group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")  # in cgroup v2
    quota = quota_cores(CGROUPS, within=own_group)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def quota_cores(groups: Path, *, within: str = "/") -> float | None:
    """Return the CPU quota of the container in cores, by cgroup v2 or v1; None without a limit.

    The limits of parent groups also apply: the smallest counts.
    """
    own = groups / within.strip("/")
    folders = [own, *own.parents[: len(own.parts) - len(groups.parts)]]
    # cgroup v2: `QUOTA PERIOD` in microseconds, or `max PERIOD`
    pairs = [_words(folder / "cpu.max") for folder in folders]
    for name in ("cpu", "cpu,cpuacct"):  # cgroup v1, where a quota of -1 means no limit
        pairs.append([*_words(groups / name / "cpu.cfs_quota_us"), *_words(groups / name / "cpu.cfs_period_us")])
    limits = [
        int(pair[0]) / int(pair[1])
        for pair in pairs
        if len(pair) == 2 and all(map(str.isdigit, pair)) and int(pair[1]) > 0
    ]
    return min(limits, default=None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def available_bytes(cgroup: Path = CGROUPS) -> int:
    """Return the bytes that can still be allocated on this machine, or in its container if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, int(limit) - int(used)) if limit != "max" else available
    except (OSError, ValueError):  # not in a container, or the container does not report it
        return available


@contextmanager
def disk_errors(folders: Sequence[Path], error_type: type[FinetuneError]) -> Iterator[None]:
    """Turn failed writes to these folders into errors of this type.

    For a full disk the message names the free space of the folders; other errors are converted only for these folders.
    """
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        refused = system_error(error)
        text = None if refused is None else disk_text(refused)
        if refused is None or text is None:
            raise
        if refused.errno in FULL:
            free = ", ".join(
                f"{folder} has {format_size(free_bytes(folder))} free" for folder in dict.fromkeys(folders)
            )
            raise error_type(f"{text} {free}. Run the same command again once there is space.") from error
        path = Path(str(refused.filename)).absolute()
        if not any(path.is_relative_to(folder.absolute()) for folder in folders):
            raise
        raise error_type(
            f"{text} Make it writable for this user, or name another folder (run.folder, data.cache_folder)."
        ) from error


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet."""
    path = folder.absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.is_dir())).free


_OWN_FILES = 512
"""Libraries, weights, prepared data, logs, and the pipes of loader processes."""

_FILES_PER_RANK = 3
"""The process that hosts the store has a socket for each rank, and so does each full mesh of gloo."""


def file_limit() -> tuple[int, int]:
    """Return the soft limit of this process, which applies, and the hard one, up to which the process may raise it.

    Unlimited is a very large number.
    """
    soft, hard = (
        1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def files_needed(world: int) -> int:
    """Return the number of open files and sockets of a process in a run of `world` processes.

    >>> files_needed(8), files_needed(1000)
    (536, 3512)
    """
    return _OWN_FILES + _FILES_PER_RANK * world


def raise_file_limit(world: int) -> str | None:
    """Raise the soft limit as the run requires; return a warning if even the hard limit is too low."""
    (soft, hard), needed = file_limit(), files_needed(world)
    if soft >= needed:
        return None
    reached = min(hard, needed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):
        reached = soft
    if reached >= needed:
        return None
    return (
        f"a process may open {reached:,} files and sockets (`ulimit -n`), and a run of {world:,} processes may "
        f"need {needed:,}: connections would then be refused. Raise the hard limit to {needed:,} (docker: --ulimit "
        f"nofile={needed}; Slurm: PropagateResourceLimits; else /etc/security/limits.conf)."
    )
