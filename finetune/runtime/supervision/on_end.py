"""`run.on_end`: starts a small process that outlives the run, and reports progress and the end to it.

No process of the run could run the user's command, since it might be killed. The first rank of each host starts the
sentinel, which is not part of the run's launcher, session or process group.
"""

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
from finetune.runtime.supervision.sentinel import EndHook, Process
from finetune.runtime.supervision.status import Peer
from finetune.runtime.supervision.watchdog import LEAST_CPU_SECONDS, main_thread_seconds
from finetune.runtime.text.terminal import format_json

_MODULE = "finetune.runtime.supervision.sentinel"
_PROGRAM = f"import sys; sys.path.append(sys.argv[1]); from {_MODULE} import main; main()"
_PACKAGE_PARENT = str(Path(finetune.__file__).parents[1])
_BEAT_SECONDS = 5.0
_READY_SECONDS = 60.0
_MIN_CPU_SECONDS = 0.02  # between two beats: more than waiting takes, less than an upload
_PREPARING, _TRAINING, _ENDING = "preparing", "training", "ending"


class RunSentinel:
    """The sentinel of this machine; without a hook, or before the start, its methods do nothing."""

    def __init__(self, hook: EndHook | None) -> None:
        self._hook = hook
        self._pipe: int | None = None
        self._lock = threading.Lock()
        self._phase = _PREPARING
        self._end: dict[str, str] = {}
        self._last_heartbeat_at = self._last_cpu_seconds = 0.0
        self._last_main_seconds = main_thread_seconds()

    def start(self) -> int | None:
        """Start the sentinel unless it was started; return its pid. Raises UserError if that fails."""
        if self._hook is None or self._pipe is not None:
            return None
        own = psutil.Process()
        hook = replace(self._hook, processes=[_identity(own)], launchers=list(map(_identity, find_launchers(own))))
        reading, writing = os.pipe()
        try:
            with subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, _PACKAGE_PARENT],
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as process:
                os.write(writing, format_json({"hook": asdict(hook)}).encode() + b"\n")
                assert process.stdout is not None
                if not select.select([process.stdout], [], [], _READY_SECONDS)[0]:
                    raise ValueError(f"it did not answer within {_READY_SECONDS:g} s")
                answer = process.stdout.readline()
            if not answer.strip().isdigit():
                raise ValueError("it exited immediately")
        except BaseException as error:
            os.close(writing)
            if not isinstance(error, OSError | ValueError):
                raise
            raise UserError(
                f"run.on_end: the process that waits for the end of the run cannot be started: {error}. Without it the "
                "command would never be run. Remove `run.on_end` to train without it."
            ) from error
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        self._pipe = writing
        threading.Thread(target=self._send_beats, name="on_end", daemon=True).start()
        return int(answer)

    def watch(self, peers: Sequence[Peer], *, host: str) -> None:
        """Name all processes of the run on this machine."""
        processes = []
        for peer in peers:
            with suppress(psutil.Error):
                if peer.host == host:
                    processes.append(_identity(psutil.Process(peer.pid)))
        if processes:
            self._send({"processes": processes})

    def begin_training(self) -> None:
        """Count only heartbeats as progress from now on."""
        self._phase = _TRAINING
        self._send({"has_trained": True})

    def end_training(self, state: str, *, reason: str) -> None:
        """Record how the run ends. From now on any CPU time counts as progress, since an upload may take long."""
        self._phase, self._end = _ENDING, {"state": state, "reason": reason}

    def exit(self, code: int) -> int:
        """Announce the end of the run just before the exit with this code; return the code."""
        if self._end:
            self._send({"end": {**self._end, "exit_code": code}})
        return code

    def call_off(self) -> None:
        """End the sentinel without running the command."""
        self._send({"call_off": True})

    def _send_beats(self) -> None:
        """Send a beat after a heartbeat or, outside training, after CPU time since the last one.

        During preparation only the main thread counts, since the watchdog's thread always works.
        """
        while self._pipe is not None:
            main_seconds, cpu_seconds = main_thread_seconds(), time.process_time()
            has_progressed = heartbeat.last_heartbeat_at != self._last_heartbeat_at
            if self._phase == _PREPARING and main_seconds - self._last_main_seconds >= LEAST_CPU_SECONDS:
                has_progressed, self._last_main_seconds = True, main_seconds
            if self._phase == _ENDING and cpu_seconds - self._last_cpu_seconds > _MIN_CPU_SECONDS:
                has_progressed = True
            self._last_heartbeat_at, self._last_cpu_seconds = heartbeat.last_heartbeat_at, cpu_seconds
            if has_progressed:
                self._send({"beat": True})
            time.sleep(_BEAT_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # the sentinel was killed or is suspended: the run continues
            if self._pipe is not None:
                os.write(self._pipe, format_json(message).encode() + b"\n")


def find_launchers(process: psutil.Process) -> list[psutil.Process]:
    """Return the ancestors of the process that may restart the run: `accelerate launch` and torchrun, nearest first."""
    launchers: list[psutil.Process] = []
    with suppress(psutil.Error):
        for parent in process.parents():
            is_elastic = not launchers and ELASTIC_VARIABLE in os.environ
            if not (is_elastic or is_launcher(parent.cmdline())):
                break
            launchers.append(parent)
    return launchers


def _identity(process: psutil.Process) -> Process:
    return process.pid, process.create_time()
