"""A competitor in a process of its own: it waits before each step until it may take it, and says what the step cost.

    python -m comparison.worker NAME

The controller sends the folder of a workload; one rank of several processes finds its number in the environment and is
sent a strategy, too, as the strategies follow one another in the same processes. Both sides write JSON, one message a
line, to the pipes that the process was started with; what libraries print goes to the log.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

MODULES = {
    "trainer": "comparison.competitors.peers",
    "trl": "comparison.competitors.peers",
    "ours": "comparison.competitors.ours",
    "pretrained": "pretrained_runs.contestants",
}
"""The modules of the competitors by the first word of their name; everybody else is in `by_hand`."""


class Worker:
    """The competitor's end of the pipes."""

    def __init__(self, listen: TextIO, speak: TextIO, *, clock: Callable[[], float] = time.process_time) -> None:
        self._listen = listen
        self._speak = speak
        self._clock = clock
        self._started: float | None = None
        self._counts: dict[str, int] = {}
        self.losses: list[Any] = []  # of each step: numbers, or tensors that are read at the end
        self.peak_bytes = 0  # of the steps; 0: the peak of the process

    def wait(self) -> None:
        """Send what the step cost that ends here, and wait until the next may begin."""
        cost = None if self._started is None else self._clock() - self._started
        self.send({"at": "step", "seconds": cost, **self._counts})
        self._counts = {}
        self.receive()
        self._started = self._clock()

    def count(self, *, tokens: int, targets: int) -> None:
        """Count what the step trains on: positions that are no padding, and those in the loss."""
        self._counts["tokens"] = self._counts.get("tokens", 0) + tokens
        self._counts["targets"] = self._counts.get("targets", 0) + targets

    def begin(self) -> None:
        """Forget the workload before."""
        self._started, self._counts, self.losses = None, {}, []

    def end(self) -> None:
        """Send what is known after the last step."""
        losses = [float(loss) for loss in self.losses]
        self.send({"at": "end", "losses": losses, "peak_bytes": self.peak_bytes or memory_bytes("VmHWM")})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        print(json.dumps(message), file=self._speak, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the next message; ends the process when the controller has gone."""
        line = self._listen.readline()
        if not line:
            os._exit(1)
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def connected() -> Iterator[Worker]:
    """Take over the pipes of this process; what is printed from here on goes to its log, which is stderr."""
    speak = os.fdopen(os.dup(1), "w")
    listen = os.fdopen(os.dup(0), "r")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with speak, listen:
        yield Worker(listen, speak)


def memory_bytes(name: str) -> int:
    """Return this process' resident memory: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main(name: str) -> None:
    """Train one workload after another, step by step."""
    with connected() as worker:
        competitor = import_module(MODULES.get(name.split()[0], "comparison.competitors.by_hand"))
        launch = import_module("comparison.competitors.launch") if "RANK" in os.environ else None
        worker.send({"at": "ready"})
        while True:
            message = worker.receive()
            worker.begin()
            with launch.environment_of(message["strategy"]) if launch else nullcontext():
                competitor.train(name, Path(message["workload"]), worker, strategy=message.get("strategy"))
            worker.end()
            if launch:
                launch.forget_accelerator()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
