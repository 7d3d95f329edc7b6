"""The windows of a stream in the training processes, which request them and wait for them through files."""

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from finetune.data.streams.folder import NOTHING, StreamReader, WindowRecord
from finetune.data.streams.producer import NUM_KEPT_WINDOWS, StreamJob
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError
from finetune.runtime.optional import no_op
from finetune.runtime.supervision.heartbeat import keep_alive

T = TypeVar("T")

_COMMAND = """
import sys
from finetune.runtime.processes import exit_with_pipe, ignore_run_signals
ignore_run_signals()
exit_with_pipe(int(sys.argv[1]))
from finetune.data.streams.producer import main
main()
"""
"""The program of a producer: before torch is imported, which takes seconds, it ends when it should."""

_POLL_SECONDS = 0.05
_QUIET_SECONDS = 2.0
"""Waiting for a window is logged after this time."""

_MAX_STARTS = 3
_OPEN_WINDOWS = NUM_KEPT_WINDOWS + 2


class Windows:
    """The windows of a stream, for any process of a run; starts the process that prepares them if there is none.

    A forked or pickled copy requests and waits on its own. Processes wait for files, never in a collective.
    """

    def __init__(self, job: StreamJob, *, log: Callable[[str], None]) -> None:
        self.job = job
        self._log = log
        self._reader: _ReaderState | None = None

    def open(self) -> int:
        """Request the first window unless it has ever been prepared; return the number of windows that have been."""
        try:
            self.job.folder.make()
        except OSError as error:
            raise DataError(f"data.cache_folder: {self.job.folder.path} cannot be written: {error}.") from error
        num_records = self.job.folder.num_records()
        self._own_reader().request(NOTHING if num_records else 0)
        return num_records

    def record(self, window: int) -> WindowRecord:
        """Return the window's record; waits until it has been prepared, raises DataError if that fails."""
        return self._own_reader().record(window)

    def prepared(self, window: int) -> TokenCache:
        """Return the window's samples; waits until it has been prepared, raises DataError if that fails."""
        return self._own_reader().opened(window)

    def if_prepared(self, window: int) -> TokenCache | None:
        """Return the window's samples if it is prepared; does not wait and requests nothing."""
        return _open_if_prepared(self.job, window, log=self._log)

    def close(self) -> None:
        """Withdraw the request and end the process that this one started."""
        if self._reader is not None and self._reader.pid == os.getpid():
            self._reader.close()
        self._reader = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_reader": None, "_log": no_op}

    def _own_reader(self) -> "_ReaderState":
        if self._reader is None or self._reader.pid != os.getpid():
            is_copy = self._reader is not None
            self._reader = _ReaderState(self.job, log=no_op if is_copy else self._log)
        return self._reader


class _ReaderState:
    """The state of one process: its registration as a reader, its open windows, and the producers it started."""

    def __init__(self, job: StreamJob, *, log: Callable[[str], None]) -> None:
        self.pid = os.getpid()
        self.opened = lru_cache(maxsize=_OPEN_WINDOWS)(self._open)
        self.record = lru_cache(maxsize=_OPEN_WINDOWS)(self._read)
        self._job = job
        self._log = log
        self._reader = StreamReader(job.folder.readers)
        self._producers: list[ProducerProcess] = []
        self._num_failed_starts = 0  # since the last window

    def request(self, window: int) -> None:
        """Request a window and the following ones without waiting."""
        self._reader.request(window)
        self._ensure_producer()

    def wait(self, window: int, read: Callable[[], T | None]) -> T:
        """Return the result of `read` once it is not None; raises DataError if preparing the window fails."""
        result = read()
        if result is None:
            self.request(window)
            result = self._wait(window, read)
        self._num_failed_starts = 0
        return result

    def close(self) -> None:
        """Unregister the reader and end the producers that were started here."""
        self._reader.close()
        for producer in self._producers:
            producer.end()

    def _wait(self, window: int, read: Callable[[], T | None]) -> T:
        start, is_logged, last_heartbeat = time.monotonic(), False, 0
        while (result := read()) is None:
            self._reader.raise_error()
            self._ensure_producer()
            if not is_logged and time.monotonic() - start > _QUIET_SECONDS:
                is_logged = True
                self._log(f"{self._job.key}: waiting for window {window} to be prepared")
            path = self._job.folder.heartbeat
            heartbeat = path.stat().st_mtime_ns if path.exists() else 0
            if heartbeat != last_heartbeat:
                keep_alive()
            last_heartbeat = heartbeat
            time.sleep(_POLL_SECONDS)
        return result

    def _read(self, window: int) -> WindowRecord:
        folder = self._job.folder
        while True:
            self.wait(window, lambda: folder.has_record(window) or None)
            try:
                return folder.read_record(window)
            except DamagedSet as damage:
                self._log(f"warning: {self._job.key}: {damage}. Its window will be prepared again.")

    def _open(self, window: int) -> TokenCache:
        self.request(window)  # even if it is prepared: the following ones are prefetched
        return self.wait(window, lambda: _open_if_prepared(self._job, window, log=self._log))

    def _ensure_producer(self) -> None:
        """Start the process that prepares windows unless one is running, which holds the lock until it exits."""
        lock = os.open(self._job.folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._num_failed_starts >= _MAX_STARTS:
                raise DataError(
                    f"{self._job.key}: the process that prepares windows exited {_MAX_STARTS} times, most recently "
                    f"with code {self._producers[-1].code} (-9: killed, perhaps out of memory). Its output is above."
                )
            self._producers.append(ProducerProcess(self._job, lock=lock))
            self._num_failed_starts += 1
        except BlockingIOError:
            return
        finally:
            os.close(lock)  # the child keeps its copy


class ProducerProcess:
    """The process that prepares windows; it exits with this process, which started it."""

    def __init__(self, job: StreamJob, *, lock: int) -> None:
        child_end, self._pipe = os.pipe()
        with tempfile.TemporaryFile() as pickled_job:
            pickle.dump(job, pickled_job)
            pickled_job.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(child_end)],
                stdin=pickled_job,
                pass_fds=(lock, child_end),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(child_end)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def end(self) -> None:
        """Make it exit and wait for it."""
        os.close(self._pipe)
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Return its exit code; None while it is running."""
        return self._process.poll()


def _open_if_prepared(job: StreamJob, window: int, *, log: Callable[[str], None]) -> TokenCache | None:
    """Return the window, verified; a damaged one is quarantined, so that it is prepared again."""
    path = job.folder.window(window)
    try:
        if not path.exists():
            return None
        prepared = TokenCache(path)
        prepared.verify()
        return prepared
    except DamagedSet as damage:
        if path.exists() and job.folder.quarantine_window(window):  # otherwise deleted while it was being opened
            log(f"warning: {job.key}: window {window}: {damage}. It will be prepared again.")
        return None
