"""Writes report.html during the run, in a thread that takes at most half a percent of the time."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from finetune.report.events import Event
from finetune.report.history import HistoryReader, RunHistory
from finetune.report.page.page import write_report

MIN_SECONDS = 10.0
"""Minimum time between two pages."""

MAX_SHARE = 0.005
"""Maximum share of time spent on pages: after a page that took 0.1 s, the next is written at least 20 s later."""


class PageReporter:
    """Rewrites the page from events.jsonl after new events, and a last time when it is closed.

    The thread reads the new lines of the file, so a resumed run continues the page, and training only wakes the thread.
    An exception in the thread is raised at the next event or at the end.
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
        self._has_events, self._is_ending = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._began = 0.0  # in CPU seconds of the thread
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Wake the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="report.html", daemon=True)
            self._thread.start()
        self._raise_error()
        if not self._has_events.is_set():
            self._has_events.set()

    def close(self) -> None:
        """Write the last page, unless there was no event."""
        self._is_ending.set()
        self._has_events.set()
        if self._thread is not None:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        try:
            while not self._is_ending.is_set():
                self._has_events.wait()
                self._is_ending.wait(self._write())
            self._write()
        except Exception as error:  # must not end the run
            self._error = error

    def _write(self) -> float:
        """Write the page, and return the number of seconds until the next."""
        self._has_events.clear()
        self._began = time.thread_time()
        self._reader.read_new(after_chunk=self._pause)
        self._on_read(self._reader.history)
        write_report(self._folder, self._reader.history)
        return max(self._min_seconds, self._seconds_due())

    def _pause(self) -> None:
        """Pause while the file of a long run is read; not at the end."""
        self._is_ending.wait(self._seconds_due())
        self._began = time.thread_time()

    def _seconds_due(self) -> float:
        return (time.thread_time() - self._began) / self._max_share
