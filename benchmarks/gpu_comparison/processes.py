"""A process for each measurement, forked from this one, which has imported everything; none outlives this one."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

Record = dict[str, Any]
Finish = Callable[[Record], NoReturn]

UNFINISHED = "it ended before all steps were taken"
_NEEDS_SPAWN = ("in forked subprocess", "initialization error")
"""CUDA's errors in a forked process whose parent has initialized it."""


class Processes:
    """Runs one function at a time, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log.txt"
        self._start: Literal["fork", "spawn"] = "fork"

    def run(self, function: Callable[..., None], *arguments: Any, timeout_seconds: float) -> Record:
        """Return the record that `function(*arguments, finish)` has handed to `finish`, or an `error` and the log.

        If an import has initialized CUDA here, this run and all later ones start new interpreters instead of forks.
        """
        record = self._run(function, arguments, timeout_seconds)
        if self._start == "fork" and any(text in record.get("error", "") for text in _NEEDS_SPAWN):
            self._start = "spawn"
            record = self._run(function, arguments, timeout_seconds)
        return record

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...], timeout_seconds: float) -> Record:
        context = get_context(self._start)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_and_exit, args=(function, arguments, sender, self._log))
        process.start()
        sender.close()
        try:
            record: Record = (
                receiver.recv()
                if receiver.poll(max(1.0, timeout_seconds))
                else {"error": f"not done within {timeout_seconds:.0f} s"}
            )
        except EOFError:
            process.join()
            record = {"error": f"ended with exit code {process.exitcode}"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if "error" in record:
            record["log"] = self._log.read_text(errors="replace").strip().splitlines()[-25:]
        return record


def _run_and_exit(function: Callable[..., None], arguments: tuple[Any, ...], sender: Connection, log: Path) -> None:
    os.setsid()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)

    def finish(record: Record) -> NoReturn:
        """Hand the record over and exit at once: nothing is to be saved."""
        sender.send(record)
        os._exit(0)

    try:
        function(*arguments, finish)
    except BaseException as error:  # whatever it is, it is this measurement's result
        traceback.print_exc()
        finish({"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
    finish({"error": UNFINISHED})


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
