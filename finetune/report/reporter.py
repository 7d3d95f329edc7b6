"""Reporters watch, they never steer."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from finetune.report.events import Event, Warned


class Reporter(Protocol):
    """Receives the events of a run."""

    def __call__(self, event: Event) -> None:
        """Receive the event."""

    def close(self) -> None:
        """Finish: flush files, end a tracker's run."""


class NullReporter:
    """Ignores all events; every rank but the first has it."""

    def __call__(self, event: Event) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Do nothing."""


class FanOut:
    """Passes events to several reporters; one that fails is dropped with a warning, and the run continues.

    They are closed last to first, so a reporter receives warnings about those after it.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)
        self._step = 0

    def __call__(self, event: Event) -> None:
        """Pass the event to all, then a warning to the rest for each one that failed."""
        self._step = event.step
        events = deque([event])
        while events:
            current = events.popleft()
            for reporter in tuple(self._reporters):
                try:
                    reporter(current)
                except Exception as error:
                    self._drop(reporter)
                    events.append(self._warning(reporter, error))

    def close(self) -> None:
        """Close everyone, also when one of them fails."""
        while self._reporters:
            reporter = self._reporters.pop()
            try:
                reporter.close()
            except Exception as error:
                self(self._warning(reporter, error))

    def _drop(self, reporter: Reporter) -> None:
        self._reporters.remove(reporter)
        with suppress(Exception):  # it has failed already
            reporter.close()

    def _warning(self, reporter: Reporter, error: Exception) -> Warned:
        name = type(reporter).__name__
        return Warned(self._step, f"{name} failed and is switched off: {type(error).__name__}: {error}")
