"""Disks that are full: a small one of the run's own, and a limit on the size of files that a process may write."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 96 << 20


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk in memory at the folder, which is made; needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "faults", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Tell whether this machine lets us mount a disk."""
    try:
        with own_disk(folder / "probe"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def fill(folder: Path, *, room: int) -> None:
    """Take all of the disk's space but `room` bytes, while others may be writing to it."""
    with (folder / "ballast").open("wb") as file:
        while (size := _free_bytes(folder) - room) > 0:
            with contextlib.suppress(OSError):  # somebody was quicker
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_bsize


def empty(folder: Path) -> None:
    """Give the space back."""
    (folder / "ballast").unlink(missing_ok=True)


def limit_files(pid: int, *, size: int) -> None:
    """Have every write of the process fail that goes beyond so many bytes of a file."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
