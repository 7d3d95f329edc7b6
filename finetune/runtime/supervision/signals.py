"""Signals are only recorded; the training loop reads them between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from finetune.errors import FinetuneError
from finetune.runtime import distributed
from finetune.runtime.processes import STOP_SIGNALS

EXIT_CODES = {"signal SIGTERM": 143, "signal SIGINT": 130, "signal SIGHUP": 129}
"""As a shell counts them."""

_INTERRUPTED = b"\nCtrl-C: the run stops after this step and saves a checkpoint. Press Ctrl-C again to exit now.\n"


class ReceivedSignals:
    """Remembers what signals have asked of this process."""

    def __init__(self, *, interrupts_start: bool = False) -> None:
        self.received: signal.Signals | None = None  # the first that asked to stop
        self.wants_save = False
        self.interrupts_start = interrupts_start  # raise at once: there is nothing to save yet
        self._num_interrupts = 0
        self._num_interrupts_heard = 0
        self._heard: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; a second SIGINT means now."""
        if number == signal.SIGUSR1:
            self.wants_save = True
            return
        self.received = self.received or signal.Signals(number)
        if self.interrupts_start:
            self.interrupts_start = False
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            if distributed.is_main():
                os.write(2, _INTERRUPTED)  # `print` may be interrupted in the middle of printing

    def set_wakeup_pipe(self, descriptor: int | None) -> None:
        """Learn of signals also from this pipe, into which the interpreter writes their numbers."""
        self._heard = descriptor

    def hear(self) -> None:
        """Take note of signals that came while the main thread can handle none, as it is stuck in a collective."""
        if self._heard is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self._heard, 1024)
            self._num_interrupts_heard += numbers.count(signal.SIGINT)
            stopping = [number for number in numbers if number in STOP_SIGNALS]
            if stopping:
                self.received = self.received or signal.Signals(stopping[0])

    @property
    def wants_immediate_exit(self) -> bool:
        """Return whether a second SIGINT has been received; where the main thread can, it has ended the run by then."""
        return self._num_interrupts_heard > 1


@contextmanager
def record_signals(*, is_callers_process: bool = False) -> Iterator[ReceivedSignals]:
    """Turn signals into notes while the context lasts; outside the main thread raises FinetuneError.

    A SIGHUP that is ignored stays ignored: a run started with `nohup` is meant to outlive its terminal. In a
    caller's process a signal raises KeyboardInterrupt until `interrupts_start` is cleared, and is handed out by
    `take_received` afterwards.
    """
    note = ReceivedSignals(interrupts_start=is_callers_process)
    numbers = [*STOP_SIGNALS, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, note.note) for number in numbers}
    except ValueError as error:
        raise FinetuneError("training must run in the main thread: only there can signals be handled") from error
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    note.set_wakeup_pipe(reading)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # an event loop's, in a notebook
    try:
        yield note
    finally:
        note.set_wakeup_pipe(None)
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        for end in (reading, writing):
            os.close(end)
        if is_callers_process:
            _received.extend([note.received] if note.received else [])


_received: list[signal.Signals] = []


def take_received() -> signal.Signals | None:
    """Return the signal that stopped the last run in a caller's process, once; None where none has."""
    number = _received[0] if _received else None
    _received.clear()
    return number
