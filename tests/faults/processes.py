"""The processes of a launch: its ranks, and whatever is left of it once the launcher has ended."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests import launching

MARK = "FINETUNE_FAULTS_LAUNCH"
"""A variable that names the launch, in all processes of one in fresh interpreters."""

ORPHAN_SECONDS = 45.0
"""In which ranks whose launcher was killed save and end; a busy machine takes its time."""


class Launched:
    """A launch that goes on; `close` ends what is left of it."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], is_cold: bool, ranks: int
    ) -> None:
        self._ranks = ranks
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        variables = {**environment, MARK: self._mark}
        with log.open("ab") as output:
            self.process = launching.begin(command, output=output, environment=variables, is_cold=is_cold)
        self._attendant = None
        if isinstance(self.process, launching.WarmProcess):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._attendant = psutil.Process(self.process.pid).parent()

    def has_ended(self) -> bool:
        """Tell whether the launcher has."""
        return self.process.poll() is not None

    def rank_pids(self) -> list[int]:
        """Return the processes of the ranks, in their order; empty before the launcher has started them."""
        if self._ranks == 1:
            return [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            children = sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.create_time())
            pids = sorted(child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE)
            return pids if len(pids) == self._ranks else []
        return []

    def family(self) -> list[psutil.Process]:
        """Return every living process that the launch has started, whoever is its parent now."""
        if self._attendant is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return [each for each in self._attendant.children(recursive=True) if _lives(each)]
            return []
        return [each for each in psutil.process_iter() if self._is_mine(each)]

    def orphans(self) -> list[str]:
        """Wait for all that the launch has started, and return the command lines of what does not end."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [_describe(process) for process in left]

    def close(self) -> None:
        """Leave nothing of it running."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.end()

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and _lives(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            return False


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.status()}: {' '.join(process.cmdline()[:6])}"
    return str(process.pid)
