"""The disks that a run writes to, their measured speed, and shared memory."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from finetune.commands.doctor.facts.host import Disk, StorageFacts
from finetune.runtime.files.atomic import temporary_path
from finetune.runtime.resources import free_bytes

SHARED_MEMORY = Path("/dev/shm")

_PROBE_BYTES = 64 << 20
_PROBE_SECONDS = 1.5
_CHUNK = 4 << 20


def gather_storage(places: Mapping[str, Path]) -> StorageFacts:
    """Return the disks of these folders, which need not exist yet, and shared memory."""
    disks = tuple(_disk(name, folder) for name, folder in places.items())
    if not SHARED_MEMORY.is_dir():
        return StorageFacts(disks)
    shared = shutil.disk_usage(SHARED_MEMORY)
    return StorageFacts(disks, shared.total, shared.free)


def _disk(name: str, folder: Path) -> Disk:
    place = existing_folder(folder)
    files = os.statvfs(place)
    return Disk(
        name=name,
        folder=str(folder),
        free_bytes=free_bytes(folder),
        filesystem=filesystem_of(place),
        free_files=files.f_favail if files.f_files else None,
        write_bytes_per_second=_write_speed(place),
        is_writable=os.access(place, os.W_OK | os.X_OK),
    )


def existing_folder(folder: Path) -> Path:
    """Return the folder, or the one above it that exists."""
    place = folder.absolute()
    return next(each for each in (place, *place.parents) if each.is_dir())


def filesystem_of(place: Path) -> str:
    """Return the kind of file system that a folder is on: `ext4`, `nfs4`, `9p`."""
    mounts = [(Path(each.mountpoint), each.fstype) for each in psutil.disk_partitions(all=True)]
    within = [(mount, kind) for mount, kind in mounts if place.resolve().is_relative_to(mount)]
    return max(within, key=lambda each: len(each[0].parts), default=(Path("/"), ""))[1]


def _write_speed(place: Path) -> float | None:
    """Return the bytes per second of a file that is written and synced, over at most 64 MiB or 1.5 s."""
    if free_bytes(place) < 4 * _PROBE_BYTES or not os.access(place, os.W_OK | os.X_OK):
        return None
    probe = temporary_path(place / "doctor-probe")
    chunk, written, started = os.urandom(_CHUNK), 0, time.perf_counter()
    try:
        with probe.open("wb") as file:
            while written < _PROBE_BYTES and time.perf_counter() - started < _PROBE_SECONDS:
                written += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
    finally:
        probe.unlink(missing_ok=True)
