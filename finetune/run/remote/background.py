"""Uploads in the background, in a thread of rank 0; the end of the run waits for them."""

import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Protocol

from finetune.config.load import LoadedConfig
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.report.events import CheckpointSaved, Event, RunEnded, Warned
from finetune.report.reporter import Reporter
from finetune.run.remote.upload import FolderSync
from finetune.runtime import distributed
from finetune.runtime.files.remote import RemoteFolder

_SECONDS_AFTER_ERROR = 20.0
"""For what is left to upload after an error: launchers end a process soon, and the next start uploads the rest."""


class Uploader(Protocol):
    """What keeps a run's folder also elsewhere, while it is entered."""

    def watch_reporter(self, reporter: Reporter) -> Reporter:
        """Return the reporter, which then also notifies the mirror when there is something to upload."""

    def finish(self, code: int) -> int:
        """Wait until everything is uploaded and return the exit code: a failure where something is missing."""

    def upload_rest(self) -> str | None:
        """Wait until everything is uploaded; return what is missing."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_uploader(loaded: LoadedConfig) -> Uploader:
    """Return who uploads this rank's run: rank 0 of a run at a URL does."""
    if loaded.remote is None or not distributed.is_main():
        return NullUploader()
    return BackgroundUploader(
        Path(loaded.config.run.folder), RemoteFolder(loaded.remote), section=loaded.config.checkpoint
    )


class NullUploader:
    """A run in a folder, or a rank that uploads nothing."""

    def watch_reporter(self, reporter: Reporter) -> Reporter:
        """Return the reporter as it is."""
        return reporter

    def finish(self, code: int) -> int:
        """Return the code."""
        return code

    def upload_rest(self) -> str | None:
        """Return that nothing is missing."""

    def __enter__(self) -> "NullUploader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class BackgroundUploader:
    """Uploads a run's folder whenever a checkpoint is whole, and at the end."""

    def __init__(self, folder: Path, remote: RemoteFolder, *, section: CheckpointSection) -> None:
        self._folder = folder
        self._url = remote.url
        self._due, self._ending = threading.Event(), threading.Event()
        self._uploads = FolderSync(folder, remote, section=section, wait=self._ending.wait)
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
        return _UploadingReporter(reporter, self)

    def wake(self) -> None:
        """Start uploading new files."""
        self._due.set()

    def warnings(self) -> list[str]:
        """Return what could not be done since the last call."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def finish(self, code: int) -> int:
        """Wait until everything is uploaded, and log it; return the code, or 1 for a success that was not uploaded."""
        missing = self.upload_rest()
        if missing is None:
            return code
        print(f"error: {missing}", file=sys.stderr, flush=True)
        return code or 1

    def upload_rest(self) -> str | None:
        """Wait until everything is uploaded, and log it; return what is missing."""
        self._end()
        if self._thread.ident is None:  # a run that was over already: an earlier start may have left something
            self._thread.start()
        self._thread.join()
        for warning in self.warnings():  # the reporter is closed
            print(f"warning: {warning}", flush=True)
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
            if not (is_last and self._failures):  # `finish` reports those in full
                self._queue_warnings()

    def _queue_warnings(self) -> None:
        if self._failures:
            self._warnings.append(f"not uploaded, tried again at the next checkpoint: {'; '.join(self._failures)}")
        elif self._uploads.repeated:
            self._warnings.append(f"uploaded only when tried again: {'; '.join(self._uploads.repeated)}")


class _UploadingReporter:
    """A reporter that also notifies a mirror."""

    def __init__(self, reporter: Reporter, mirror: BackgroundUploader) -> None:
        self._reporter = reporter
        self._mirror = mirror

    def __call__(self, event: Event) -> None:
        self._reporter(event)
        for warning in self._mirror.warnings():
            self._reporter(Warned(event.step, warning))
        if isinstance(event, CheckpointSaved | RunEnded):
            self._mirror.wake()

    def close(self) -> None:
        self._reporter.close()
