"""Reporters watch, they never steer."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from finetune.report.events import Event, Warned


class Reporter(Protocol):
    """Somebody who is told what happens."""

    def __call__(self, event: Event) -> None:
        """Take note of the event."""

    def close(self) -> None:
        """Finish: flush files, end a tracker's run."""


class NullReporter:
    """Tells nobody; every rank but the first has it."""

    def __call__(self, event: Event) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Do nothing."""


class FanOut:
    """Tells several reporters; one that fails is dropped with a warning to the others and the run goes on.

    They are closed last to first, so a reporter hears of the failures of those that come after it.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)
        self._step = 0

    def __call__(self, event: Event) -> None:
        """Tell everyone, then tell those who are left about each one that failed."""
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
        with suppress(Exception):  # it has failed already; what it still holds is let go if it can be
            reporter.close()

    def _warning(self, reporter: Reporter, error: Exception) -> Warned:
        name = type(reporter).__name__
        return Warned(self._step, f"{name} failed and is told nothing more: {type(error).__name__}: {error}")
