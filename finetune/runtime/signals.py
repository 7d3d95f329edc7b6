"""Signals only leave a note; whoever runs the loop reads it between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from finetune.errors import FinetuneError


class SignalNote:
    """Remembers the first signal that asked this process to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; a second SIGINT means now."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


@contextmanager
def noted_signals() -> Iterator[SignalNote]:
    """Turn SIGTERM and SIGINT into notes while the context lasts; outside the main thread raises FinetuneError."""
    note = SignalNote()
    try:
        before = {number: signal.signal(number, note.note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError as error:
        raise FinetuneError("training must run in the main thread, where signals arrive") from error
    try:
        yield note
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
