"""Digests the checkpoint to resume from in background threads while the rest of the start continues. No torch."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import FileChecksum, file_checksum, files_to_verify, read_manifest
from finetune.errors import CheckpointError
from finetune.runtime.resources import usable_cores

ChecksumOf = Callable[[Path], FileChecksum]
"""Returns size and digest of a file."""

MAX_THREADS = 4


class ChecksumPrefetch:
    """Checksums of files, computed before they are needed; each is returned once, if the file did not change."""

    def __init__(self, paths: Sequence[Path] = (), *, num_threads: int = 1) -> None:
        self._futures: dict[Path, Future[tuple[object, FileChecksum]]] = {path: Future() for path in paths}
        self._queue = deque(self._futures.items())
        for number in range(min(num_threads, len(paths))):
            threading.Thread(target=self._work, name=f"checksums {number}", daemon=True).start()

    def checksum(self, path: Path) -> FileChecksum:
        """Return the file's checksum; it is read now unless a prefetched one is still valid. Raises OSError."""
        future = self._futures.pop(path, None)
        if future is not None:
            stamp, checksum = future.result()
            if stamp == _file_stamp(path):
                return checksum
        return file_checksum(path)

    def clear(self) -> None:
        """Start no further reads."""
        self._queue.clear()
        self._futures.clear()

    def _work(self) -> None:
        while self._queue:
            try:
                path, future = self._queue.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                future.set_result((_file_stamp(path), file_checksum(path)))
            except Exception:  # the caller reads the file again and gets the error
                future.set_result((None, FileChecksum(0, "")))


def start_checksum_prefetch(folder: Path, *, resume: str | Path) -> ChecksumPrefetch:
    """Start digesting this rank's share of the checkpoint that the run will probably resume from, if there is one.

    The rank comes from the launcher's environment, since torch is not imported yet.
    """
    checkpoint = layout.newest_checkpoint(folder) if resume == "auto" else Path(resume)
    if resume == "never" or checkpoint is None:
        return ChecksumPrefetch()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        names = files_to_verify(read_manifest(checkpoint), rank=rank, world=world)
    except CheckpointError:  # reported when the checkpoint is verified
        return ChecksumPrefetch()
    return ChecksumPrefetch([checkpoint / name for name in names], num_threads=min(MAX_THREADS, usable_cores()))


def _file_stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat(follow_symlinks=False)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
