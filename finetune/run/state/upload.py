"""One-way synchronization: files that the run folder has are uploaded, files that it has deleted are deleted.

A checkpoint's files go first and its manifest last: the manifest is the marker, and a folder without it is no
checkpoint. Whatever is deleted loses its marker first, and only once the newest checkpoint's is up. Files are uploaded
in the background, in a thread of rank 0; the end of the run waits for them.
"""

import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import parse_manifest, read_manifest
from finetune.checkpoint.write.retention import checkpoint_metrics, removable_steps
from finetune.config.load import LoadedConfig
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.report.events import CheckpointSaved, Event, RunEnded, Warned
from finetune.report.reporter import Reporter
from finetune.run.state.run_folder import marked_steps, step_of_file
from finetune.runtime import distributed
from finetune.runtime.files.remote import RemoteFolder
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FAILED_FINAL_FOLDER, FINAL_FOLDER
from finetune.runtime.supervision.heartbeat import fault_point

_LINKS = ".uploading"
_NOT_UPLOADED = (
    CHECKPOINTS_FOLDER,
    FAILED_FINAL_FOLDER,
    "STOP",
)  # of the folder's first level; a request to stop is for this start alone


class FolderSync:
    """Brings a run's URL up to its folder, one call after the other; all of it is in one thread's hands."""

    def __init__(self, folder: Path, remote: RemoteFolder, *, section: CheckpointSection) -> None:
        self.remote = remote
        self._folder = folder
        self._section = section
        self._up: dict[int, bytes] = {}  # the markers that are known to be up
        self._known: set[int] = set()  # steps whose checkpoints have been in the folder
        self._sent: dict[str, tuple[int, int]] = {}  # size and modification time of each uploaded file
        shutil.rmtree(folder / _LINKS, ignore_errors=True)

    def sync(self, *, is_last: bool) -> list[str]:
        """Upload and delete files as needed; return failures as sentences. The last call also uploads `final/`."""
        failures: list[str] = []
        try:
            sizes = self.remote.sizes()
        except Exception as error:  # each storage has exceptions of its own
            return [f"{self.remote.url} cannot be listed: {error}"]
        for name, act in self._tasks(sizes, is_last=is_last):
            try:
                act()
            except Exception as error:  # one file that cannot be uploaded keeps no other from it
                failures.append(f"{name}: {type(error).__name__}: {error}")
        return failures

    def _tasks(self, sizes: dict[str, int], *, is_last: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the tasks by name, the newest checkpoint first: an older one may be deleted meanwhile."""
        local = {
            step: path
            for step, path in layout.steps(self._folder / CHECKPOINTS_FOLDER).items()
            if (path / layout.MANIFEST).is_file()
        }
        self._known |= local.keys()
        for step in sorted(local, reverse=True):
            yield f"{CHECKPOINTS_FOLDER}/{local[step].name}", partial(self._checkpoint, step, local[step], sizes)
        if not local or max(local) in self._up:
            yield "files that were deleted here", partial(self._delete_gone, local, sizes)
        left_out = _NOT_UPLOADED if is_last else (*_NOT_UPLOADED, FINAL_FOLDER)
        files = [path.relative_to(self._folder) for path in self._folder.rglob("*") if path.is_file()]
        for name in sorted(file.as_posix() for file in files if file.parts[0] not in left_out):
            if not any(part.startswith(".") for part in name.split("/")):
                yield name, partial(self._file, name)
        if is_last and (self._folder / FINAL_FOLDER).is_dir():
            exported = (name for name in sizes if name.startswith(f"{FINAL_FOLDER}/"))
            old = [name for name in exported if not (self._folder / name).exists()]
            yield f"old files of {FINAL_FOLDER}", partial(self.remote.delete, old)

    def _checkpoint(self, step: int, path: Path, sizes: dict[str, int]) -> None:
        remote_folder = f"{CHECKPOINTS_FOLDER}/{path.name}"
        marker = f"{remote_folder}/{layout.MANIFEST}"
        with self._linked(path) as linked:
            if linked is None:
                return
            text = (linked / layout.MANIFEST).read_bytes()
            if marker in sizes and text in (self._up.get(step), self.remote.read(marker)):
                self._up[step] = text
                return
            self.remote.delete([marker] if marker in sizes else [])
            names = set(read_manifest(linked).files)
            for name in sorted(names):
                self._upload(linked / name, f"{remote_folder}/{name}", point="upload.file", step=step)
            self._upload(linked / layout.MANIFEST, marker, point="upload.marker", step=step)
            self._up[step] = text
            ours = {marker, *(f"{remote_folder}/{name}" for name in names)}
            self.remote.delete(name for name in sizes if step_of_file(name) == step and name not in ours)

    @contextmanager
    def _linked(self, path: Path) -> Iterator[Path | None]:
        """Hand out the checkpoint's files under names that stay while it is uploaded; None if it is gone already."""
        links = self._folder / _LINKS / path.name
        shutil.rmtree(links, ignore_errors=True)
        try:
            shutil.copytree(path, links, copy_function=os.link)
            held: Path | None = links
        except (OSError, shutil.Error):
            held = path if (path / layout.MANIFEST).exists() else None
        try:
            yield held
        finally:
            shutil.rmtree(self._folder / _LINKS, ignore_errors=True)

    def _delete_gone(self, local: dict[int, Path], sizes: dict[str, int]) -> None:
        """Delete checkpoints that retention has removed, that were never finished, or that are of an abandoned end."""
        there = {step for name in sizes if (step := step_of_file(name)) is not None} - local.keys()
        marked = set(marked_steps(sizes))
        newest = max(local, default=-1)
        strangers = {step for step in there & marked if step not in self._known and step < newest}
        staying = strangers - set(self._removable(local, strangers)) if strangers else set()
        for step in sorted(there - staying):
            if local or step not in marked:
                names = [name for name in sizes if step_of_file(name) == step]
                self.remote.delete(sorted(names, key=lambda name: not name.endswith(f"/{layout.MANIFEST}")))
                self._up.pop(step, None)

    def _removable(self, local: dict[int, Path], strangers: set[int]) -> list[int]:
        metrics: dict[int, Mapping[str, float]] = {step: checkpoint_metrics(path) for step, path in local.items()}
        for step in strangers:
            name = f"{CHECKPOINTS_FOLDER}/{layout.step_folder(Path(), step).name}/{layout.MANIFEST}"
            marker = self.remote.read(name) or b""
            try:
                metrics[step] = parse_manifest(marker, path=Path(name)).metrics
            except CheckpointError:  # it is not there, or cannot be believed
                metrics[step] = {}
        return removable_steps(
            metrics,
            keep_last=self._section.keep_last,
            newest_valid=max(local),
            keep_every_steps=self._section.keep_every_steps,
            keep_best=self._section.keep_best,
            metrics=metrics,
        )

    def _file(self, name: str) -> None:
        path = self._folder / name
        try:
            facts = path.stat()
        except FileNotFoundError:
            return
        seen = (facts.st_size, facts.st_mtime_ns)
        if self._sent.get(name) != seen:
            self._upload(path, name, point="upload.file", step=0)
            self._sent[name] = seen

    def _upload(self, path: Path, name: str, *, point: str, step: int) -> None:
        fault_point(point, step=step, path=path)
        self.remote.upload(path, name)


_LAST_PAUSE_SECONDS = 5.0
"""Before the last upload is tried again: the storage may have failed for a moment, besides its client's retries."""

_SECONDS_AFTER_ERROR = 20.0
"""For what is left to upload after an error: launchers end a process soon, and the next start uploads the rest."""


class Uploader:
    """Keeps a run's folder also elsewhere while it is entered; this one, of a run in a folder, uploads nothing."""

    def watch_reporter(self, reporter: Reporter) -> Reporter:
        """Return the reporter, which then also starts an upload when there is something new."""
        return reporter

    def finish(self, code: int) -> int:
        """Wait until everything is uploaded, and log it; return the code, or 1 for a success that was not uploaded."""
        missing = self.upload_rest()
        if missing is None:
            return code
        print(f"error: {missing}", file=sys.stderr, flush=True)
        return code or 1

    def upload_rest(self) -> str | None:
        """Wait until everything is uploaded, and log it; return what is missing."""
        return None

    def __enter__(self) -> "Uploader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class BackgroundUploader(Uploader):
    """Uploads a run's folder whenever a checkpoint is whole, and at the end."""

    def __init__(self, folder: Path, remote: RemoteFolder, *, section: CheckpointSection) -> None:
        self._folder = folder
        self._url = remote.url
        self._due, self._ending = threading.Event(), threading.Event()
        self._uploads = FolderSync(folder, remote, section=section)
        self._failures: list[str] = []
        self._warnings: deque[str] = deque()  # from the thread to the reporter
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def __enter__(self) -> "BackgroundUploader":
        self._thread.start()
        self._due.set()  # what an earlier start could not upload
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, upload what a short time allows; otherwise leave the rest to `finish`."""
        if kind is not None:
            self._end()
            self._thread.join(_SECONDS_AFTER_ERROR)

    def watch_reporter(self, reporter: Reporter) -> Reporter:
        """Return the reporter, which then also wakes the uploads and reports their warnings."""

        def report(event: Event) -> None:
            reporter(event)
            for _ in range(len(self._warnings)):
                reporter(Warned(event.step, self._warnings.popleft()))
            if isinstance(event, CheckpointSaved | RunEnded):
                self._due.set()

        return report

    def upload_rest(self) -> str | None:
        """Wait until everything is uploaded, and log it; return what is missing."""
        self._end()
        if self._thread.ident is None:  # a run that was over already: an earlier start may have left something
            self._thread.start()
        self._thread.join()
        while self._warnings:  # the reporter is closed
            print(f"warning: {self._warnings.popleft()}", flush=True)
        if not self._failures:
            print(f"everything is at {self._url}", flush=True)
            return None
        lines = "".join(f"  {failure}\n" for failure in self._failures)
        return (
            f"{self._url} lacks {len(self._failures)} of this run's files or folders\n{lines}"
            f"They are in {self._folder}. Run the same command again: it uploads what is missing."
        )

    def _end(self) -> None:
        self._ending.set()
        self._due.set()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._due.wait()
            self._due.clear()
            is_last = self._ending.is_set()
            self._failures = self._uploads.sync(is_last=is_last)
            if is_last and self._failures:
                time.sleep(_LAST_PAUSE_SECONDS)
                self._failures = self._uploads.sync(is_last=True)
            elif self._failures:
                self._warnings.append(f"not uploaded, tried again at the next checkpoint: {'; '.join(self._failures)}")


def make_uploader(loaded: LoadedConfig) -> Uploader:
    """Return who uploads this rank's run: rank 0 of a run at a URL does."""
    if loaded.remote is None or not distributed.is_main():
        return Uploader()
    return BackgroundUploader(
        Path(loaded.config.run.folder), RemoteFolder(loaded.remote), section=loaded.config.checkpoint
    )
