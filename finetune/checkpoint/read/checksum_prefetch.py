"""Digests the checkpoint to resume from in background threads while the rest of the start goes on. No torch."""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import BLOCK_BYTES, FileChecksum, file_checksum, files_to_verify, read_manifest
from finetune.errors import CheckpointError
from finetune.runtime.background import run_in_background
from finetune.runtime.resources import usable_cores

ChecksumOf = Callable[[Path], FileChecksum]
"""Returns size and digest of a file."""

MAX_THREADS = 4
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel*", "davinci[0-9]*", "dri/render*")


@dataclass(frozen=True)
class _ReadFile:
    """A file as it was read; `whole` is all of it where it is kept."""

    state: object  # by which the file system tells whether it was written since
    facts: FileChecksum
    whole: np.ndarray | None = None


class ChecksumPrefetch:
    """Digests of files, begun before anybody asks. Each is handed out once, and only of a file that is as it was.

    Files whose path `keeps` fits stay in memory until `forget`: they are read once, not twice.
    """

    def __init__(
        self, paths: Sequence[Path] = (), *, num_threads: int = 1, keeps: Callable[[Path], bool] = lambda _: False
    ) -> None:
        self._keeps = keeps
        self._begun: dict[Path, Future[_ReadFile]] = {path: Future() for path in paths}
        self._waiting = deque(self._begun.items())
        self._kept: dict[Path, np.ndarray] = {}
        for number in range(min(num_threads, len(paths))):
            run_in_background(self._work, name=f"digests {number}")

    def facts(self, path: Path) -> FileChecksum:
        """Return what the file is; read now unless that was begun, and is still true. Raises OSError."""
        begun = self._begun.pop(path, None)
        if begun is not None:
            read = begun.result()
            if read.state == _file_stamp(path):
                if read.whole is not None:
                    self._kept[path] = read.whole
                return read.facts
        return file_checksum(path)

    def kept(self, path: Path) -> np.ndarray | None:
        """Return the bytes that were digested, of a file that is kept: uint8."""
        return self._kept.get(path)

    def forget(self) -> None:
        """Keep no file any longer, and begin no other."""
        for each in (self._waiting, self._begun, self._kept):
            each.clear()

    def _work(self) -> None:
        while self._waiting:
            try:
                path, begun = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                state = _file_stamp(path)
                read = _read_whole(path) if self._keeps(path) else (file_checksum(path), None)
                begun.set_result(_ReadFile(state, *read))
            except Exception:  # whoever asks reads the file himself, and meets the error
                begun.set_result(_ReadFile(None, FileChecksum(0, "")))


def start_checksum_prefetch(folder: Path, *, resume: str | Path) -> ChecksumPrefetch:
    """Return digests of this rank's share of the checkpoint that the run will probably continue from; perhaps none.

    A process alone without a device keeps what it reads of the optimizer's state, which becomes the state itself.
    The launcher's environment says which rank this is: it is too early for torch.
    """
    newest = next(reversed(layout.steps(folder).values()), None) if resume == "auto" else Path(resume)
    if resume == "never" or newest is None:
        return ChecksumPrefetch()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        names = files_to_verify(read_manifest(newest), rank=int(os.environ.get("RANK", "0")), world=world)
    except CheckpointError:  # said when it is verified
        return ChecksumPrefetch()
    is_alone = world == 1 and not _may_have_device()
    return ChecksumPrefetch(
        [newest / name for name in names],
        num_threads=min(MAX_THREADS, usable_cores()),
        keeps=lambda path: is_alone and path.parent.name == "optimizer",
    )


def _may_have_device() -> bool:
    """Tell whether there may be an accelerator, as far as can be told without torch."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in _DEVICE_FILES)


def _read_whole(path: Path) -> tuple[FileChecksum, np.ndarray]:
    """Return the file's facts and its bytes, digested while they are in a core's cache."""
    whole = np.empty(path.stat().st_size, dtype=np.uint8)
    digest, size, room = hashlib.sha256(), 0, whole.data
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room[size : size + BLOCK_BYTES]):
            digest.update(room[size : size + count])
            size += count
    return FileChecksum(size, digest.hexdigest()), whole


def _file_stamp(path: Path) -> tuple[int, ...]:
    found = path.stat(follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
