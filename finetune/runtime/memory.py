"""How much memory there is to be had."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this machine can still give, or the container where that allows less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, int(limit) - int(used)) if limit != "max" else available
    except (OSError, ValueError):  # no container, or one that does not tell
        return available
