"""A stream's windows as the processes see them that train: they ask by a file, wait on files, and read."""

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from finetune.data.streams.folder import NOTHING, StreamReader, WindowRecord
from finetune.data.streams.producer import NUM_KEPT_WINDOWS, StreamJob
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError
from finetune.runtime.optional import no_op
from finetune.runtime.supervision.heartbeat import keep_alive

T = TypeVar("T")

_COMMAND = "from finetune.data.streams.producer import main; main()"
_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 2.0
"""How long a window is waited for without a message."""

_MAX_STARTS = 3
_OPEN_WINDOWS = NUM_KEPT_WINDOWS + 2


class Windows:
    """The windows of a stream, from any process of a run; where none prepares them, one is started.

    A copy in another process, forked or sent, asks and waits for itself. Waiting is on files, never in a collective.
    """

    def __init__(self, job: StreamJob, *, log: Callable[[str], None]) -> None:
        self.job = job
        self._log = log
        self._desk: _ReaderState | None = None

    def open(self) -> int:
        """Have windows prepared from the first on, if it never was; return how many have been at some time."""
        try:
            self.job.folder.make()
        except OSError as error:
            raise DataError(f"data.cache_folder: {self.job.folder.path} cannot be written: {error}.") from error
        num_records = self.job.folder.num_records()
        self._own().request(NOTHING if num_records else 0)
        return num_records

    def record(self, window: int) -> WindowRecord:
        """Return what is remembered of the window; waits until it has been prepared, raises DataError if it cannot."""
        return self._own().record(window)

    def prepared(self, window: int) -> TokenCache:
        """Return the window's samples; waits likewise."""
        return self._own().opened(window)

    def at_hand(self, window: int) -> TokenCache | None:
        """Return the window's samples if they are at hand; does not wait, and asks for nothing."""
        return _find(self.job, window, log=self._log)

    def close(self) -> None:
        """Ask for nothing any more, and end the process that this one has started."""
        if self._desk is not None and self._desk.pid == os.getpid():
            self._desk.close()
        self._desk = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_desk": None, "_log": no_op}

    def _own(self) -> "_ReaderState":
        if self._desk is None or self._desk.pid != os.getpid():
            is_copy = self._desk is not None
            self._desk = _ReaderState(self.job, log=no_op if is_copy else self._log)
        return self._desk


class _ReaderState:
    """The state of one process: its registration as a reader, its open windows, the producers it has started."""

    def __init__(self, job: StreamJob, *, log: Callable[[str], None]) -> None:
        self.pid = os.getpid()
        self.opened = lru_cache(maxsize=_OPEN_WINDOWS)(self._open)
        self.record = lru_cache(maxsize=_OPEN_WINDOWS)(self._read)
        self._job = job
        self._log = log
        self._reader = StreamReader(job.folder.readers)
        self._started: list[ProducerProcess] = []
        self._num_in_vain = 0  # starts since a window came

    def request(self, window: int) -> None:
        """Ask for a window and those after it without waiting."""
        self._reader.want(window)
        self._start_maker()

    def wait(self, window: int, find: Callable[[], T | None]) -> T:
        """Return what is found, as soon as it is; raises DataError where the window cannot be prepared."""
        found = find()
        if found is None:
            self.request(window)
            found = self._wait(window, find)
        self._num_in_vain = 0
        return found

    def close(self) -> None:
        """Leave the readers, and end the makers that were started here."""
        self._reader.close()
        for maker in self._started:
            maker.end()

    def _wait(self, window: int, find: Callable[[], T | None]) -> T:
        begun, is_quiet, sign = time.monotonic(), True, 0
        while (found := find()) is None:
            self._reader.raise_error()
            self._start_maker()
            if is_quiet and time.monotonic() - begun > _QUIET_SECONDS:
                is_quiet = False
                self._log(f"{self._job.key}: waiting for window {window}, which is being prepared")
            if sign != (sign := _changed_at(self._job.folder.sign_of_life)):
                keep_alive()
            time.sleep(_PAUSE_SECONDS)
        return found

    def _read(self, window: int) -> WindowRecord:
        folder = self._job.folder
        while True:
            self.wait(window, lambda: folder.has_record(window) or None)
            try:
                return folder.read_record(window)
            except DamagedSet as damage:
                self._log(f"warning: {self._job.key}: {damage}. Its window is prepared again.")

    def _open(self, window: int) -> TokenCache:
        self.request(window)  # also where it is at hand: those after it are to be prepared
        return self.wait(window, lambda: _find(self._job, window, log=self._log))

    def _start_maker(self) -> None:
        """Start the process that prepares windows, unless one lives: it holds the lock, however it may end."""
        lock = os.open(self._job.folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._refuse_more_starts()
            self._started.append(ProducerProcess(self._job, lock=lock))
            self._num_in_vain += 1
        except BlockingIOError:
            return
        finally:
            os.close(lock)  # the child has it still

    def _refuse_more_starts(self) -> None:
        if self._num_in_vain >= _MAX_STARTS:
            raise DataError(
                f"{self._job.key}: the process that prepares windows has ended {_MAX_STARTS} times, the last time "
                f"with code {self._started[-1].code} (-9: killed, perhaps out of memory). Its output is above."
            )


class ProducerProcess:
    """The process that prepares windows, as the one sees it that has started it, with which it ends."""

    def __init__(self, job: StreamJob, *, lock: int) -> None:
        listens, self._keeps_alive = os.pipe()
        with tempfile.TemporaryFile() as written:
            pickle.dump(job, written)
            written.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(listens)],
                stdin=written,
                pass_fds=(lock, listens),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(listens)

    @property
    def pid(self) -> int:
        """Return its number."""
        return self._process.pid

    def end(self) -> None:
        """End it and wait until it has."""
        os.close(self._keeps_alive)
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Return its exit code; None while it lives."""
        return self._process.poll()


def _find(job: StreamJob, window: int, *, log: Callable[[str], None]) -> TokenCache | None:
    """Return the window, verified; one that is damaged is set aside, so that it is prepared again."""
    path = job.folder.window(window)
    try:
        if not path.exists():
            return None
        prepared = TokenCache(path)
        prepared.verify()
        return prepared
    except DamagedSet as damage:
        if path.exists() and job.folder.set_window_aside(window):  # else deleted while it was being opened
            log(f"warning: {job.key}: window {window}: {damage}. It is prepared again.")
        return None


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
