"""A contestant's seat: it waits for the token before each step, and says what the step before cost.

Both sides speak JSON, a line a message: over the pipes that the process was started with as its input and output. What
libraries print goes to the log instead.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Seat:
    """One contestant's end of the line."""

    def __init__(self, listen: TextIO, speak: TextIO, *, clock: Callable[[], float] = time.process_time) -> None:
        self._listen = listen
        self._speak = speak
        self._clock = clock
        self._began: float | None = None
        self._noted: dict[str, float] = {}
        self.losses: list[Any] = []  # of each step: numbers, or tensors that are read at the end

    def wait(self) -> None:
        """Say what the step cost that ends here, and wait until the next may begin."""
        cost = None if self._began is None else self._clock() - self._began
        self.say({"at": "step", "seconds": cost, **self._noted})
        self._noted = {}
        self.hear()
        self._began = self._clock()

    def note(self, *, tokens: int, targets: int) -> None:
        """Note what the step learns: positions that are no padding, and those that count in the loss."""
        self._noted["tokens"] = self._noted.get("tokens", 0) + tokens
        self._noted["targets"] = self._noted.get("targets", 0) + targets

    def begin(self) -> None:
        """Forget the workload before."""
        self._began, self._noted, self.losses = None, {}, []

    def end(self) -> None:
        """Say what is known when the last step has been taken."""
        losses = [float(loss) for loss in self.losses]
        self.say({"at": "end", "losses": losses, "peak_bytes": peak_bytes()})

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        print(json.dumps(message), file=self._speak, flush=True)

    def hear(self) -> dict[str, Any]:
        """Return the next message; ends the process where nobody is there any more."""
        line = self._listen.readline()
        if not line:
            os._exit(1)
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def taken_seat() -> Iterator[Seat]:
    """Take the seat of this process; what is printed from here on goes to its log, which is stderr."""
    speak = os.fdopen(os.dup(1), "w")
    listen = os.fdopen(os.dup(0), "r")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with speak, listen:
        yield Seat(listen, speak)


def peak_bytes() -> int:
    """Return the most memory that this process has held at once."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
