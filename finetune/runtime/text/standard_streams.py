"""Opens missing standard streams before the first import, and lets Ctrl-C end the process.

Imports only the standard library.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
CLOSED_PIPE = 141  # 128 + SIGPIPE, as of other commands


def open_missing_streams() -> None:
    """Open /dev/null for each of the three standard streams that the caller has closed (`>&-`).

    Python leaves such a stream as None, and the next file that is opened would get its descriptor, with whatever
    libraries print there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False))  # noqa: SIM115


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once from now on, since nothing has started yet or everything is done."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise_interrupt):
        signal.signal(signal.SIGINT, _exit_at_once)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C in this context, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is not _exit_at_once:
        yield
        return
    signal.signal(signal.SIGINT, _raise_interrupt)
    try:
        yield
    finally:
        exit_on_interrupt()


@contextmanager
def exit_on_interrupt_while_importing() -> Iterator[None]:
    """Make Ctrl-C end the process at once while a command imports its packages.

    Libraries do not expect a KeyboardInterrupt there: transformers turns it into an ImportError.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not _raise_interrupt
    ):
        yield
        return
    signal.signal(signal.SIGINT, _exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _raise_interrupt)


def flush_streams() -> OSError | None:
    """Flush standard output and error; return the error if standard output cannot be written.

    After an error the rest goes to /dev/null, since Python would otherwise write a traceback at exit.
    """
    failure: OSError | None = None
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and descriptor == 1:
                failure = error
            discard_output(descriptor)
            with suppress(OSError, ValueError):
                stream.flush()
    return failure


def discard_output(descriptor: int) -> None:
    """Redirect this descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def is_pipe_closed() -> bool:
    """Return whether the reader of standard output or standard error has exited (`| head -1`)."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
