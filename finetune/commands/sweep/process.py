"""The processes of a sweep: each in a session of its own, so that Ctrl-C reaches only the sweep, and ended with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from finetune.commands.sweep.launch import VISIBLE_DEVICES, LaunchPlan
from finetune.commands.sweep.runs import LOGS_FOLDER, SweepRun, data_facts
from finetune.config.load import LoadedConfig
from finetune.runtime.processes import terminate_with_parent
from finetune.runtime.text.terminal import printable

POLL_SECONDS = 0.1

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
        parent = psutil.Process(process.pid)
        for descendant in [*parent.children(recursive=True), parent]:
            with suppress(psutil.Error):
                descendant.kill()


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
    """Records SIGINT, SIGTERM and SIGHUP inside the context; a second SIGINT means immediately."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._handlers_before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        """Handle the signals; a SIGHUP that is ignored stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                self._handlers_before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        """Handle them as before."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, _: object) -> None:
        self.is_urgent = self.first is not None and number == signal.SIGINT
        self.first = self.first or signal.Signals(number)


def shared_data(runs: Iterable[SweepRun], configs: Mapping[str, LoadedConfig]) -> list[list[SweepRun]]:
    """Return the groups of two or more runs that read the same tokenized data."""
    groups: dict[object, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(data_facts(configs[run.name].config), []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def prepare_data(run: SweepRun, *, number: int, plan: LaunchPlan, stop: StopSignals, start: Start) -> str | None:
    """Run `finetune prepare` with the run's overrides; return the message of a failure, None for a success.

    Data that several runs share is tokenized here, before they start: none of them waits for another one's lock.
    """
    log = run.sweep_folder / LOGS_FOLDER / f"prepare-{number}.log"
    words = [word for override in run.overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "finetune", "prepare", "--config", str(plan.job), *words]
    process = start(command, log, {VISIBLE_DEVICES: ""})
    is_signalled = False
    while (code := process.poll()) is None:
        if stop.first is not None and not is_signalled:
            is_signalled = True
            process.send_signal(stop.first)
        time.sleep(POLL_SECONDS)
    if code == 0 or stop.first is not None:
        return None
    return last_message(log) or f"`finetune prepare` ended with exit code {code}; see {log}"
