"""The processor cores that this process may use: fewer than the machine has, in a container or under an affinity."""

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may use at once: at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores(GROUPS, within=_own_group(Path("/proc/self/cgroup")))
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def quota_cores(groups: Path, *, within: str = "/") -> float | None:
    """Return the cores whose time the container is granted, by cgroup v2 or v1; None where nothing limits it.

    A group is limited by those that it is in, too: the smallest counts.
    """
    own = groups / within.strip("/")
    folders = [own, *own.parents[: len(own.parts) - len(groups.parts)]]
    found = [cores for folder in folders if (cores := _quota(folder)) is not None]
    found += [cores for name in ("cpu", "cpu,cpuacct") if (cores := _old_quota(groups / name)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    """Read `cpu.max`: `QUOTA PERIOD` in microseconds, or `max PERIOD`."""
    words = _words(folder / "cpu.max")
    return _cores(words[0], words[1]) if len(words) == 2 else None


def _old_quota(folder: Path) -> float | None:
    """Read the two files of cgroup v1; a quota of -1 is none."""
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return _cores(quota[0], period[0]) if quota and period else None


def _cores(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None


def _own_group(file: Path) -> str:
    """Return the path of this process's group in cgroup v2."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
