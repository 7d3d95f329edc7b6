"""Reporters watch, they never steer."""

from collections.abc import Sequence
from typing import Protocol

from finetune.report.events import Event


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
    """Tells several reporters; one that fails is dropped with a warning to the others and the run goes on."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)

    def __call__(self, event: Event) -> None:
        """Tell everyone."""
        raise NotImplementedError

    def close(self) -> None:
        """Close everyone."""
        raise NotImplementedError
