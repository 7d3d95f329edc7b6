"""Writes report.html while the run continues, in a thread that may take half a percent of the time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from finetune.report.events import Event
from finetune.report.history import HistoryReader, RunHistory
from finetune.report.page.page import write_report

MIN_SECONDS = 10.0
"""Between two pages."""

MAX_SHARE = 0.005
"""Of the time that goes into pages: after one that took 0.1 s, the next is written 20 s later at the earliest."""


class PageReporter:
    """Rewrites the page from events.jsonl whenever there is something new, and a last time when it is closed.

    The thread reads the lines that the run has written since it looked last, so a resumed run continues the page, and
    training only wakes the thread. It raises what the thread has met, at the next event or at the end.
    """

    def __init__(
        self,
        events: Path,
        *,
        min_seconds: float = MIN_SECONDS,
        max_share: float = MAX_SHARE,
        on_read: Callable[[RunHistory], None] = lambda history: None,
    ) -> None:
        """`on_read` is called in the thread, with the history as of each page, before the page is written."""
        self._folder = events.parent
        self._reader = HistoryReader(events)
        self._min_seconds, self._max_share = min_seconds, max_share
        self._on_read = on_read
        self._news, self._ending = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._began = 0.0  # of the thread's own time
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Wake the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="report.html", daemon=True)
            self._thread.start()
        self._raise_error()
        if not self._news.is_set():
            self._news.set()

    def close(self) -> None:
        """Write the last page; after a run without events, none."""
        self._ending.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        try:
            while not self._ending.is_set():
                self._news.wait()
                self._ending.wait(self._write())
            self._write()
        except Exception as error:  # a warning of the run, never its end
            self._error = error

    def _write(self) -> float:
        """Write the page, and return for how many seconds there is to be no other one."""
        self._news.clear()
        self._began = time.thread_time()
        self._reader.read_new(after_chunk=self._pause)
        self._on_read(self._reader.history)
        write_report(self._folder, self._reader.history)
        return max(self._min_seconds, self._seconds_due())

    def _pause(self) -> None:
        """Pause while the file of a long run is read; not at the end."""
        self._ending.wait(self._seconds_due())
        self._began = time.thread_time()

    def _seconds_due(self) -> float:
        return (time.thread_time() - self._began) / self._max_share
