"""Digests the checkpoint to resume from in background threads while the rest of the start continues. No torch."""

import hashlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import BLOCK_BYTES, FileChecksum, file_checksum, files_to_verify, read_manifest
from finetune.errors import CheckpointError
from finetune.runtime.resources import usable_cores

ChecksumOf = Callable[[Path], FileChecksum]
"""Returns size and digest of a file."""

MAX_THREADS = 4
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel*", "davinci[0-9]*", "dri/render*")


@dataclass(frozen=True)
class _ReadFile:
    """A file that was read; `content` is all of it if it is cached."""

    stamp: object  # of the file system, which changes with the file
    checksum: FileChecksum
    content: np.ndarray | None = None


class ChecksumPrefetch:
    """Checksums of files, computed before they are needed; each is returned once, and only if the file did not change.

    Files for which `caches` returns True stay in memory until `clear`, so that they are read only once.
    """

    def __init__(
        self, paths: Sequence[Path] = (), *, num_threads: int = 1, caches: Callable[[Path], bool] = lambda _: False
    ) -> None:
        self._caches = caches
        self._futures: dict[Path, Future[_ReadFile]] = {path: Future() for path in paths}
        self._queue = deque(self._futures.items())
        self._cached: dict[Path, np.ndarray] = {}
        for number in range(min(num_threads, len(paths))):
            threading.Thread(target=self._work, name=f"checksums {number}", daemon=True).start()

    def checksum(self, path: Path) -> FileChecksum:
        """Return the file's checksum; it is read now unless a prefetched one is still valid. Raises OSError."""
        future = self._futures.pop(path, None)
        if future is not None:
            read = future.result()
            if read.stamp == _file_stamp(path):
                if read.content is not None:
                    self._cached[path] = read.content
                return read.checksum
        return file_checksum(path)

    def cached_bytes(self, path: Path) -> np.ndarray | None:
        """Return the bytes (uint8) of a cached file whose checksum was returned; None for any other."""
        return self._cached.get(path)

    def clear(self) -> None:
        """Drop all cached files and start no further reads."""
        for container in (self._queue, self._futures, self._cached):
            container.clear()

    def _work(self) -> None:
        while self._queue:
            try:
                path, future = self._queue.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                stamp = _file_stamp(path)
                read = _read_whole(path) if self._caches(path) else (file_checksum(path), None)
                future.set_result(_ReadFile(stamp, *read))
            except Exception:  # the caller reads the file again and gets the error
                future.set_result(_ReadFile(None, FileChecksum(0, "")))


def start_checksum_prefetch(folder: Path, *, resume: str | Path) -> ChecksumPrefetch:
    """Start digesting this rank's share of the checkpoint that the run will probably resume from, if there is one.

    A single process without an accelerator caches the optimizer's files, whose bytes become the optimizer state itself.
    The rank comes from the launcher's environment, since torch is not imported yet.
    """
    checkpoint = layout.newest_checkpoint(folder) if resume == "auto" else Path(resume)
    if resume == "never" or checkpoint is None:
        return ChecksumPrefetch()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        names = files_to_verify(read_manifest(checkpoint), rank=int(os.environ.get("RANK", "0")), world=world)
    except CheckpointError:  # reported when the checkpoint is verified
        return ChecksumPrefetch()
    has_device = sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in _DEVICE_FILES)
    is_single = world == 1 and not has_device
    return ChecksumPrefetch(
        [checkpoint / name for name in names],
        num_threads=min(MAX_THREADS, usable_cores()),
        caches=lambda path: is_single and path.parent.name == "optimizer",
    )


def _read_whole(path: Path) -> tuple[FileChecksum, np.ndarray]:
    """Return the file's checksum and its bytes, digested while they are in a core's cache."""
    content = np.empty(path.stat().st_size, dtype=np.uint8)
    digest, size, buffer = hashlib.sha256(), 0, content.data
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer[size : size + BLOCK_BYTES]):
            digest.update(buffer[size : size + count])
            size += count
    return FileChecksum(size, digest.hexdigest()), content


def _file_stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat(follow_symlinks=False)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
