"""Named points that a run passes: the watchdog reads the last one, and a fault can be injected there.

FINETUNE_FAULTS="save.rename step=3 rank=1 do=kill; forward step=5 do=nan"

Each fault has a point (one of POINTS) and `do=` one of ACTIONS; `step=`, `rank=` and `part=` restrict it, and it is
injected once. Tests use it to check recovery; without the variable nothing happens.
"""

import errno
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily():  # imports torch, which some commands with heartbeats (deleting checkpoints) do not need
    from finetune.runtime import distributed

VARIABLE = "FINETUNE_FAULTS"

INJECTED = "fault injected"
"""The start of the line that each injected fault prints to standard error."""

POINTS = (
    "prepare.write",
    "prepare.saved",
    "prepare.finish",
    "prepare.done",
    "data",
    "forward",
    "backward",
    "update.before",
    "update.after",
    "evaluate",
    "save.begin",
    "save.copied",
    "save.write",
    "save.written",
    "save.manifest",
    "save.rename",
    "save.done",
    "prune.rename",
    "prune.delete",
    "load.verify",
    "load.begin",
    "load.read",
    "load.done",
    "upload.file",
    "upload.marker",
    "export.begin",
    "export.write",
    "export.done",
)
"""Points for faults, in the order of preparation, a step, a save, a load and an export."""

ACTIONS = ("kill", "terminate", "interrupt", "stop", "raise", "no_space", "sleep", "nan", "flip", "truncate")
"""The faults: `stop` is SIGSTOP, `sleep` takes `seconds=`, `flip` (a bit) and `truncate` need a point with a file."""

_SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
}


@dataclass(frozen=True)
class Heartbeat:
    """A point that was passed, and the time (monotonic seconds)."""

    point: str
    step: int
    at: float


last_heartbeat = Heartbeat("start", 0, time.monotonic())
"""The last heartbeat of the main thread."""

last_heartbeat_at = last_heartbeat.at
"""The time of the last heartbeat of any thread (monotonic seconds)."""


def fault_point(point: str, *, step: int, path: Path | None = None, tensor: Any = None) -> None:
    """Record a heartbeat at this point, and inject a fault if one is due; without faults the cost is negligible.

    `path` is a file that a fault may damage, `tensor` a scalar that it may turn into NaN. Faults are injected in any
    thread, and heartbeats of any thread count, since the main thread may be waiting for a background write.
    """
    global last_heartbeat, last_heartbeat_at
    assert point in POINTS, f"{point} is not in heartbeat.POINTS"
    last_heartbeat_at = now = time.monotonic()
    if threading.current_thread() is threading.main_thread():
        last_heartbeat = Heartbeat(point, step, now)
    if VARIABLE not in os.environ:
        read_faults.cache_clear()  # faults that are set again are injected again
        return
    faults = read_faults(os.environ[VARIABLE])
    due = [fault for fault in faults if fault.is_due(point, step=step, rank=distributed.rank(), path=path)]
    for fault in due:
        fault.inject(path, tensor)


def keep_alive() -> None:
    """Record that this process is alive without a heartbeat, since it waits for another process."""
    global last_heartbeat_at
    last_heartbeat_at = time.monotonic()


@dataclass
class Fault:
    """A fault that is injected once."""

    point: str
    action: str
    step: int | None = None  # None: any
    rank: int | None = None
    part: str | None = None  # in the file's name
    seconds: float = 3600.0
    was_injected: bool = field(default=False, compare=False)

    def is_due(self, point: str, *, step: int, rank: int, path: Path | None) -> bool:
        """Return whether the fault is due at this point."""
        matches = point == self.point and self.step in (None, step) and self.rank in (None, rank)
        return (
            matches and not self.was_injected and (self.part is None or (path is not None and self.part in path.name))
        )

    def inject(self, path: Path | None, tensor: Any = None) -> None:
        """Inject the fault into the process, the file at `path` or the tensor; printed to standard error first."""
        self.was_injected = True
        print(f"{INJECTED}: {self.action} at {self.point}", file=sys.stderr, flush=True)
        if self.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.action])
        elif self.action == "raise":
            raise RuntimeError(f"injected fault at {self.point}")
        elif self.action == "no_space":
            raise OSError(errno.ENOSPC, "No space left on device")
        elif self.action == "sleep":
            time.sleep(self.seconds)
        elif self.action == "nan":
            if tensor is not None:
                tensor.data.fill_(float("nan"))
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: gradient * float("nan"))
        elif path is None:
            raise UserError(f"{VARIABLE}: this point has no file to damage.")
        elif self.action == "truncate":
            os.truncate(path, path.stat().st_size // 2)
        else:  # flip the lowest bit of the last byte
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))


@lru_cache(maxsize=1)
def read_faults(variable: str) -> list[Fault]:
    """Return the faults of the variable, which know whether they were injected; raises UserError for an invalid one.

    >>> read_faults("save.rename step=3 do=kill")
    [Fault(point='save.rename', action='kill', step=3, rank=None, part=None, seconds=3600.0, was_injected=False)]
    """
    faults = []
    for part in variable.split(";"):
        point, *rest = part.split() or [""]
        if not point:
            continue
        values = dict(word.partition("=")[::2] for word in rest)
        action = values.pop("do", "")
        try:
            if point not in POINTS or action not in ACTIONS or set(values) - {"step", "rank", "part", "seconds"}:
                raise ValueError
            step, rank = (int(values[name]) if name in values else None for name in ("step", "rank"))
            seconds = float(values.get("seconds", 3600))
        except ValueError:
            raise UserError(
                f"{VARIABLE}: `{' '.join(part.split())}` is not a valid fault. Write POINT do=ACTION [step=N] [rank=N] "
                f"[part=TEXT] [seconds=N], points: {', '.join(POINTS)}; actions: {', '.join(ACTIONS)}."
            ) from None
        faults.append(Fault(point, action, step, rank, values.get("part"), seconds=seconds))
    return faults
