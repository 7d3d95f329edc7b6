"""A run's process: in a session of its own, so that Ctrl-C reaches only the sweep; it ends when the sweep is killed."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from finetune.runtime.processes import terminate_with_parent
from finetune.runtime.text.terminal import printable

_TAIL_BYTES = 20_000
_MAX_MESSAGE_LINES = 12


class StartedProcess(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal; nothing where it has ended."""


Start = Callable[[Sequence[str], Path, Mapping[str, str]], StartedProcess]
"""Starts a command with a log file and additions to the environment."""


def start_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> StartedProcess:
    """Start the command, its output appended to the log; when this process is killed, the kernel sends it SIGTERM."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=partial(terminate_with_parent, os.getpid()),
        )


def kill_tree(process: StartedProcess) -> None:
    """Kill the process and all that it has started."""
    with suppress(psutil.Error):
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in tree:
            with suppress(psutil.Error):
                each.kill()


def last_message(log: Path) -> str:
    """Return the error at the end of a log, or its last lines; empty where there is nothing to read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    first = starts[-1] if starts else max(0, len(lines) - _MAX_MESSAGE_LINES)
    return printable("\n".join(lines[first:][:_MAX_MESSAGE_LINES])).removeprefix("error: ")


class StopSignals:
    """Remembers SIGINT, SIGTERM and SIGHUP while the context lasts; a second SIGINT means now."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        """Handle the signals; a SIGHUP that is ignored stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Handle them as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: object) -> None:
        self.is_urgent = self.first is not None and number == signal.SIGINT
        self.first = self.first or signal.Signals(number)
