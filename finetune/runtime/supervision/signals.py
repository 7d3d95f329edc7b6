"""Records signals, which the training loop reads between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from finetune.errors import FinetuneError
from finetune.runtime import distributed
from finetune.runtime.processes import STOP_SIGNALS

EXIT_CODES = {"signal SIGTERM": 143, "signal SIGINT": 130, "signal SIGHUP": 129}
"""Exit codes as in a shell."""

_INTERRUPTED = b"\nCtrl-C: the run stops after this step and saves a checkpoint. Press Ctrl-C again to exit now.\n"


class ReceivedSignals:
    """The signals that this process has received."""

    def __init__(self, *, interrupts_start: bool = False) -> None:
        self.received: signal.Signals | None = None  # the first stop signal
        self.wants_save = False
        self.interrupts_start = interrupts_start  # raise at once: there is nothing to save yet
        self._num_interrupts = 0
        self._num_piped_interrupts = 0
        self._wakeup_pipe: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; a second SIGINT raises KeyboardInterrupt."""
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
                os.write(2, _INTERRUPTED)  # the signal may have interrupted a `print`

    def set_wakeup_pipe(self, descriptor: int | None) -> None:
        """Also read signals from this pipe, to which the interpreter writes their numbers."""
        self._wakeup_pipe = descriptor

    def read_wakeup_pipe(self) -> None:
        """Record signals that the main thread cannot handle because it is stuck in a collective."""
        if self._wakeup_pipe is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self._wakeup_pipe, 1024)
            self._num_piped_interrupts += numbers.count(signal.SIGINT)
            stopping = [number for number in numbers if number in STOP_SIGNALS]
            if stopping:
                self.received = self.received or signal.Signals(stopping[0])

    @property
    def wants_immediate_exit(self) -> bool:
        """Return whether a second SIGINT was received that the main thread could not handle."""
        return self._num_piped_interrupts > 1


@contextmanager
def record_signals(*, is_callers_process: bool = False) -> Iterator[ReceivedSignals]:
    """Record signals in this context; outside the main thread raises FinetuneError.

    An ignored SIGHUP stays ignored: a run under `nohup` outlives its terminal. In a caller's process a signal raises
    KeyboardInterrupt until `interrupts_start` is cleared; later ones are returned by `take_received`.
    """
    note = ReceivedSignals(interrupts_start=is_callers_process)
    numbers = [*STOP_SIGNALS, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, note.note) for number in numbers}
    except ValueError as error:
        raise FinetuneError("training must run in the main thread, which alone can handle signals") from error
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
