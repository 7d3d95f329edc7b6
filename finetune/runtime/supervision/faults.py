"""Fault injection: an environment variable names a point of the run and a fault.

FINETUNE_FAULTS="save.rename step=3 rank=1 do=kill; forward step=5 do=nan"

Each fault has a point (one of POINTS) and `do=` one of ACTIONS; `step=`, `rank=` and `part=` restrict it, and it is
injected once. Tests use it to check recovery; without the variable nothing happens.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import UserError

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

_INJECTORS: Mapping[str, Callable[["Fault", Path | None], None]] = {
    "kill": lambda fault, path: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda fault, path: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda fault, path: os.kill(os.getpid(), signal.SIGINT),
    "stop": lambda fault, path: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda fault, path: _raise(RuntimeError(f"injected fault at {fault.point}")),
    "no_space": lambda fault, path: _raise(OSError(errno.ENOSPC, "No space left on device")),
    "sleep": lambda fault, path: time.sleep(fault.seconds),
    "nan": lambda fault, path: None,  # of a tensor: see `inject`
    "flip": lambda fault, path: _flip(path),
    "truncate": lambda fault, path: os.truncate(_required(path), _required(path).stat().st_size // 2),
}


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
        _INJECTORS[self.action](self, path)
        if self.action == "nan" and tensor is not None:
            tensor.data.fill_(float("nan"))
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * float("nan"))


def read_faults(written: str) -> list[Fault]:
    """Return the faults of the variable; raises UserError for an invalid one.

    >>> read_faults("save.rename step=3 do=kill")
    [Fault(point='save.rename', action='kill', step=3, rank=None, part=None, seconds=3600.0, was_injected=False)]
    """
    return [_read_fault(part.split()) for part in written.split(";") if part.strip()]


def _read_fault(words: list[str]) -> Fault:
    point, *rest = words
    values = dict(word.partition("=")[::2] for word in rest)
    action = values.pop("do", "")
    try:
        if point not in POINTS or action not in ACTIONS or set(values) - {"step", "rank", "part", "seconds"}:
            raise ValueError
        step, rank = (int(values[name]) if name in values else None for name in ("step", "rank"))
        return Fault(point, action, step, rank, values.get("part"), seconds=float(values.get("seconds", 3600)))
    except ValueError:
        raise UserError(
            f"{VARIABLE}: `{' '.join(words)}` is not a valid fault. Write POINT do=ACTION [step=N] [rank=N] "
            f"[part=TEXT] [seconds=N], points: {', '.join(POINTS)}; actions: {', '.join(ACTIONS)}."
        ) from None


def _raise(error: Exception) -> None:
    raise error


def _flip(path: Path | None) -> None:
    with _required(path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def _required(path: Path | None) -> Path:
    if path is None:
        raise UserError(f"{VARIABLE}: this point has no file to damage.")
    return path
