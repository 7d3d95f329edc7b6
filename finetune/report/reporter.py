"""Reporters only observe a run; callbacks of plugins may also request an evaluation, a checkpoint or a stop."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from finetune.registry.observers import CALLBACKS, NO_REQUEST, Request
from finetune.report.events import Event, Noted, Warned
from finetune.runtime.optional import lazily, no_op

with lazily():  # torch
    from finetune.runtime import distributed


Reporter = Callable[[Event], object]
"""Receives the events of a run. Its `close`, if it has one, flushes files or ends a tracker's run."""


class FanOut:
    """Passes events to several reporters; one that fails is dropped with a warning, and the run continues.

    They are closed last to first, so a reporter receives warnings about those after it.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)
        self._step = 0

    def __call__(self, event: Event) -> None:
        """Pass the event to all reporters, then a warning to the others for each that failed."""
        self._step = event.step
        events = deque([event])
        while events:
            current = events.popleft()
            for reporter in tuple(self._reporters):
                try:
                    reporter(current)
                except (Exception, SystemExit) as error:
                    self._reporters.remove(reporter)
                    with suppress(Exception, SystemExit):  # it has failed already
                        getattr(reporter, "close", no_op)()
                    events.append(self._warning(reporter, error))

    def close(self) -> None:
        """Close all reporters, even if one of them fails."""
        while self._reporters:
            reporter = self._reporters.pop()
            try:
                getattr(reporter, "close", no_op)()
            except (Exception, SystemExit) as error:
                self(self._warning(reporter, error))

    def _warning(self, reporter: Reporter, error: BaseException) -> Warned:
        name = getattr(reporter, "__name__", type(reporter).__name__)
        return Warned(self._step, f"{name} failed and is disabled: {type(error).__name__}: {error}")


Callback = Callable[[Event], Request | None]


class CallbackReporter:
    """Passes events to the reporter, then to the callbacks, and collects the callbacks' requests on this rank.

    A callback that raises, or that returns anything but a Request or None, is disabled with a warning: the run
    continues. The requests are summed over the ranks with the counts of the next step, so that all ranks act on them.
    """

    def __init__(self, reporter: Reporter, names: Sequence[str], *, can_evaluate: bool) -> None:
        self._reporter = reporter
        self._can_evaluate = can_evaluate
        self._requested = NO_REQUEST
        self._callbacks: dict[str, Callback] = {}
        for name in names:
            try:
                self._callbacks[name] = CALLBACKS.resolve(name)()
            except (Exception, SystemExit) as error:
                self._warn(0, f"callback `{name}` failed to start and is disabled: {type(error).__name__}: {error}")

    def __call__(self, event: Event) -> None:
        """Pass the event to the reporter and the callbacks."""
        self._reporter(event)
        for name, callback in tuple(self._callbacks.items()):
            try:
                request = callback(event)
                if not isinstance(request, Request | None):
                    raise TypeError(f"it returned `{request!r}`, not a register.Request or None")
            except (Exception, SystemExit) as error:
                del self._callbacks[name]
                message = f"callback `{name}` failed and is disabled: {type(error).__name__}: {error}"
                self._warn(event.step, message)
                continue
            new = (request or NO_REQUEST) & ~self._requested
            if Request.EVALUATE in new and not self._can_evaluate:
                self._can_evaluate = True  # warn only once: without rows an evaluation does nothing
                text = f"callback `{name}` requests an evaluation, but the job has no `evaluate:` section"
                self._warn(event.step, text)
            if new:
                self._requested |= new
                words = " and ".join(str(one.name).lower() for one in Request if one in new)
                self._reporter(Noted(event.step, f"callback `{name}` requests: {words}"))

    def take_requests(self) -> Request:
        """Return the requests since the last call."""
        requested, self._requested = self._requested, NO_REQUEST
        return requested

    def _warn(self, step: int, message: str) -> None:
        if distributed.is_main():
            self._reporter(Warned(step, message))
        else:  # this rank's reporter prints nothing
            print(f"[rank {distributed.rank()}] warning: {message}", file=sys.stderr, flush=True)


def print_line(line: str) -> None:
    """Print the line and flush."""
    print(line, flush=True)


class RunLog:
    """Prints messages on rank 0 and keeps them; silent on other ranks."""

    def __init__(self, *, is_main: bool, write: Callable[[str], None] = print_line) -> None:
        self._is_main = is_main
        self._write = write
        self.messages: list[str] = []

    def __call__(self, message: str) -> None:
        """Print the message; repeated messages are printed once."""
        if self._is_main and message not in self.messages:
            self.messages.append(message)
            self._write(message)
