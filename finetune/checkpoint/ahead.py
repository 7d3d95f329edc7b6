"""What a run will verify is read and digested from its first moment on, beside all else that a start has to do."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from finetune.checkpoint import layout
from finetune.checkpoint.behind import begin_behind
from finetune.checkpoint.manifest import FileFacts, file_facts, read_manifest, verified_by
from finetune.errors import CheckpointError
from finetune.runtime import ranks
from finetune.runtime.cores import usable_cores

Facts = Callable[[Path], FileFacts]
"""Returns size and digest of a file."""

MOST_THREADS = 4


class Ahead:
    """Digests of files, begun before anybody asks. Each is handed out once, and only of a file that is as it was."""

    def __init__(self, paths: Sequence[Path] = (), *, num_threads: int = 1) -> None:
        self._begun: dict[Path, Future[tuple[object, FileFacts]]] = {path: Future() for path in paths}
        self._waiting = deque(self._begun.items())
        for number in range(min(num_threads, len(paths))):
            begin_behind(self._work, name=f"digests {number}")

    def facts(self, path: Path) -> FileFacts:
        """Return what the file is; read now unless that was begun, and is still true. Raises OSError."""
        begun = self._begun.pop(path, None)
        if begun is not None:
            state, facts = begun.result()
            if state == _state(path):
                return facts
        return file_facts(path)

    def _work(self) -> None:
        while self._waiting:
            try:
                path, begun = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                state = _state(path)
                begun.set_result((state, file_facts(path)))
            except OSError:  # whoever asks reads the file himself, and meets the error
                begun.set_result((None, FileFacts(0, "")))


def begin_ahead(folder: Path, *, resume: str | Path) -> Ahead:
    """Return digests of this rank's share of the checkpoint that the run will probably continue from; perhaps none."""
    newest = next(reversed(layout.steps(folder).values()), None) if resume == "auto" else Path(resume)
    if resume == "never" or newest is None:
        return Ahead()
    try:
        names = verified_by(read_manifest(newest), rank=ranks.rank(), world=ranks.world())
    except CheckpointError:  # said when it is verified
        return Ahead()
    return Ahead([newest / name for name in names], num_threads=max(1, min(MOST_THREADS, usable_cores() - 1)))


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat(follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
