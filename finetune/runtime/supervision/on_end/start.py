"""The run's side of `run.on_end`: starts the sentinel, and lets it know of progress and of the end."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

import finetune
from finetune.errors import UserError
from finetune.runtime.processes import ELASTIC_VARIABLE, is_launcher
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.activity import OwnActivity
from finetune.runtime.supervision.on_end.outcome import EndHook, Process
from finetune.runtime.supervision.status import Peer
from finetune.runtime.text.terminal import format_json

_MODULE = "finetune.runtime.supervision.on_end.sentinel"
_PROGRAM = f"import sys; sys.path.append(sys.argv[1]); from {_MODULE} import main; main()"
_PACKAGE_PARENT = str(Path(finetune.__file__).parents[1])
_BEAT_SECONDS = 5.0
_READY_SECONDS = 60.0
_LEAST_CPU_SECONDS = 0.02  # of work between two beats: an upload; waiting for one takes less
_PREPARING, _TRAINING, _ENDING = "preparing", "training", "ending"


class RunSentinel:
    """The sentinel of this machine; without an order, or before it is started, everything does nothing."""

    def __init__(self, order: EndHook | None) -> None:
        self._order = order
        self._pipe: int | None = None
        self._lock = threading.Lock()
        self._phase = _PREPARING
        self._end: dict[str, str] = {}
        self._main_thread = OwnActivity()
        self._seen = (0.0, 0.0)  # the last heartbeat, and the processor time

    def start(self) -> int | None:
        """Start it, unless that is done; return its process number. Raises UserError where that is impossible."""
        if self._order is None or self._pipe is not None:
            return None
        me = psutil.Process()
        order = replace(self._order, processes=(_identity(me),), launchers=tuple(map(_identity, find_launchers(me))))
        try:
            pid, self._pipe = _start_process(order)
        except (OSError, ValueError) as error:
            raise UserError(
                f"run.on_end: the process that waits for the end of the run cannot be started: {error}. Without it the "
                "command would never be run. Leave `run.on_end` out to train all the same."
            ) from error
        threading.Thread(target=self._beat, name="on_end", daemon=True).start()
        return pid

    def watch(self, peers: Sequence[Peer], *, host: str) -> None:
        """Name all processes of the run on this machine."""
        found = []
        for peer in peers:
            with suppress(psutil.Error):
                if peer.host == host:
                    found.append(_identity(psutil.Process(peer.pid)))
        if found:
            self._send({"processes": found})

    def begin_training(self) -> None:
        """From now on, progress is what the hang watchdog takes for it."""
        self._phase = _TRAINING
        self._send({"has_trained": True})

    def end_training(self, state: str, *, reason: str) -> None:
        """Remember how the run ends. From now on, work of any kind is progress: an upload may take long."""
        self._phase, self._end = _ENDING, {"state": state, "reason": reason}

    def exit(self, code: int) -> int:
        """Announce the end of the run, when nothing is left to do but to exit with this code; return the code."""
        if self._end:
            self._send({"end": {**self._end, "exit_code": code}})
        return code

    def call_off(self) -> None:
        """Have it end without running the command."""
        self._send({"call_off": True})

    def _beat(self) -> None:
        while self._pipe is not None:
            if self._has_moved():
                self._send({"beat": True})
            time.sleep(_BEAT_SECONDS)

    def _has_moved(self) -> bool:
        """Tell whether a point was passed or, outside training, work was done since the last call."""
        before, self._seen = self._seen, (heartbeat.last_heartbeat_at(), time.process_time())
        if self._seen[0] != before[0] or self._phase == _TRAINING:
            return self._seen[0] != before[0]
        if self._phase == _PREPARING:  # the watchdog, which works in any case, is another thread
            return self._main_thread.has_moved()
        return self._seen[1] - before[1] > _LEAST_CPU_SECONDS

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # it was killed, or is suspended: the run goes on
            if self._pipe is not None:
                os.write(self._pipe, format_json(message).encode() + b"\n")


def find_launchers(process: psutil.Process) -> list[psutil.Process]:
    """Return the launchers above the process that may start the run again, the nearest first.

    `accelerate launch` and `torchrun`, and the supervisor of `finetune launch torchrun --supervise` above them.
    """
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for parent in process.parents():
            is_elastic = not found and ELASTIC_VARIABLE in os.environ
            if not (is_elastic or is_launcher(parent.cmdline()) or is_supervisor(parent.cmdline())):
                break
            found.append(parent)
    return found


def is_supervisor(command: Sequence[str]) -> bool:
    """Return whether this command line is that of our own launcher.

    >>> is_supervisor(["python", "-m", "finetune", "launch", "torchrun"]), is_supervisor(["vi", "finetune"])
    (True, False)
    """
    words = [Path(word).name for word in command[:4]]
    return "finetune" in words and words[words.index("finetune") + 1 :][:1] == ["launch"]


def _identity(process: psutil.Process) -> Process:
    return process.pid, process.create_time()


def _start_process(order: EndHook) -> tuple[int, int]:
    """Return the sentinel's process number and the pipe to it; raises OSError or ValueError."""
    reading, writing = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, _PACKAGE_PARENT],
            stdin=reading,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as started:
            os.write(writing, format_json({"order": asdict(order)}).encode() + b"\n")
            assert started.stdout is not None
            has_answered = select.select([started.stdout], [], [], _READY_SECONDS)[0]
            answer = started.stdout.readline() if has_answered else b""
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    if not answer.strip().isdigit():
        os.close(writing)
        raise ValueError(f"it did not answer within {_READY_SECONDS:g} s" if not has_answered else "it ended at once")
    os.set_blocking(writing, False)
    return int(answer), writing
