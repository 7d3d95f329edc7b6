"""A worker's end of the pipe: it waits for its turn, and ends when nobody is there any more. Imports no torch."""

import os
import signal
import sys
import threading
from typing import TextIO

GO = b"go\n"


def connected() -> tuple[int, TextIO]:
    """Return the pipe on which the turn comes and the file for the record; what libraries print goes to the log."""
    listen, speak = os.dup(0), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return listen, speak


def wait_for_turn(listen: int, speak: TextIO) -> None:
    """Say that everything is imported, and return when it is this process' turn.

    Where the pipe is closed, before or after, this process ends with all that it has started.
    """
    print("ready", file=speak, flush=True)
    if os.read(listen, len(GO)) != GO:
        os._exit(0)  # left out
    threading.Thread(target=_end_with_controller, args=(listen,), daemon=True).start()


def _end_with_controller(listen: int) -> None:
    while os.read(listen, 1):
        pass
    if os.getpgid(0) == os.getpid():  # a group of its own, as the controller starts it
        os.killpg(0, signal.SIGKILL)
    sys.stderr.flush()
    os._exit(1)
