"""The process that outlives a run: `python -m finetune.runtime.supervision.on_end.sentinel`, orders on standard input.

Each line is a JSON object: the `order` first, then `beat` for progress, `processes` once all ranks are known,
`has_trained`, `end` with how the run has ended, and `call_off`. SIGTERM calls it off, too.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psutil

from finetune.runtime.supervision.on_end.command import TIMED_OUT, EndLog, command_environment, run_command
from finetune.runtime.supervision.on_end.outcome import (
    LEAVE,
    EndHook,
    Observation,
    Process,
    RunEnd,
    describe_end,
    end_of_run,
    next_action,
)
from finetune.runtime.text.terminal import format_json

REPLACED = signal.SIGUSR1
"""Sent to the sentinel of an earlier start by that of a new one."""

_TICK_SECONDS = 1.0
_SUSPENDED_SECONDS = 30.0  # between two ticks: the machine or this process slept, and nobody was idle
_EXIT_SECONDS = 60.0  # after a process has announced its end: one that lives on is not the run's alone
_MAX_STATUS_BYTES = 4 << 20


class Sentinel:
    """Waits for the end of one run on this machine."""

    def __init__(self, order: EndHook, *, source: int = 0) -> None:
        self._order = order
        self._source: int | None = source
        self._rest = b""
        self._announced: Mapping[str, Any] | None = None
        self._announced_at = self._ended_at = float("inf")
        self._last_beat = self._last_tick = time.monotonic()
        self._is_called_off = self._is_replaced = False
        self._claim = Path(order.run_folder) / f".on_end-{order.host}.json"
        self._log = EndLog(Path(order.log))

    def claim(self) -> None:
        """Take the place of the sentinel of an earlier start on this machine, which ends if it is still there."""
        before = _read_object(self._claim)
        pid = before.get("pid")
        is_other = before.get("launch") != self._order.launch
        if is_other and isinstance(pid, int) and _lives((pid, before.get("created"))):
            if before.get("has_trained") is True:
                self._order = replace(self._order, has_trained=True)
            with suppress(OSError):
                os.kill(pid, REPLACED)
        self._write_claim()

    def wait(self) -> RunEnd | None:
        """Return the end for which the command is due; None where there is nothing to do."""
        signal.signal(signal.SIGTERM, self._call_off)
        signal.signal(REPLACED, self._give_way)
        while not self._is_called_off:
            self._listen()
            action = next_action(self._look(), self._order)
            if isinstance(action, RunEnd):
                return action
            if action == LEAVE:
                return None
        return None

    def run(self, end: RunEnd) -> None:
        """Run the command, once, and log how it went."""
        order = self._order
        for number in (signal.SIGTERM, REPLACED):
            signal.signal(number, _pass)  # ignored ones would be for the command, too; it may end the machine itself
        self._log(
            f"{_now()} {order.host}: {end.outcome} ({end.reason}, step {end.step}, exit code {end.exit_code}); runs "
            f"{order.shown}"
        )
        started = time.monotonic()
        environment = command_environment(os.environ, describe_end(end, order))
        code = run_command(order.command, environment=environment, log=self._log, timeout_seconds=order.timeout_seconds)
        seconds = time.monotonic() - started
        if code == TIMED_OUT:
            result = f"warning: the command was killed after {seconds:.1f} s (run.on_end.timeout_seconds)"
        elif code:
            result = f"warning: the command failed with exit code {code} after {seconds:.1f} s"
        else:
            result = f"done after {seconds:.1f} s"
        self._log(f"{_now()} {order.host}: {result}")

    def release(self) -> None:
        """Remove the claim, unless it is another one's by now."""
        if _read_object(self._claim).get("pid") == os.getpid():
            with suppress(OSError):
                self._claim.unlink()

    def _call_off(self, number: int, frame: object) -> None:
        self._is_called_off = True
        self._log(f"{_now()} {self._order.host}: called off by {signal.Signals(number).name}")

    def _give_way(self, number: int, frame: object) -> None:
        self._is_replaced = True

    def _look(self) -> Observation:
        now = time.monotonic()
        if now - self._last_tick > _SUSPENDED_SECONDS:
            self._last_beat = now
        self._last_tick = now
        is_alive = self._is_alive(now)
        while not is_alive and self._source is not None and select.select([self._source], [], [], 0)[0]:
            self._read()  # the last words of a process that has just ended
        self._ended_at = float("inf") if is_alive else min(self._ended_at, now)
        status = _read_object(Path(self._order.run_folder) / "status.json")
        return Observation(
            is_alive=is_alive,
            quiet_seconds=now - self._last_beat,
            ended_seconds=now - self._ended_at,
            is_replaced=self._is_replaced,
            end=end_of_run(self._announced, status, order=self._order),
        )

    def _is_alive(self, now: float) -> bool:
        if any(map(_lives, self._order.launchers)):
            return True
        return now - self._announced_at < _EXIT_SECONDS and any(map(_lives, self._order.processes))

    def _listen(self) -> None:
        """Take in what the run says, for a tick at most."""
        if self._source is None:
            time.sleep(_TICK_SECONDS)
            return
        if select.select([self._source], [], [], _TICK_SECONDS)[0]:
            self._read()

    def _read(self) -> None:
        if self._source is None:
            return
        content = os.read(self._source, 1 << 16)
        if not content:
            self._source = None
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        self._last_beat = time.monotonic()
        if "processes" in message:
            self._order = replace(self._order, processes=tuple((pid, at) for pid, at in message["processes"]))
        if "has_trained" in message:
            self._order = replace(self._order, has_trained=True)
            self._write_claim()
        if "end" in message:
            self._announced, self._announced_at = dict(message["end"]), time.monotonic()
        self._is_called_off = self._is_called_off or "call_off" in message

    def _write_claim(self) -> None:
        facts = {"pid": os.getpid(), "created": psutil.Process().create_time(), "launch": self._order.launch}
        temporary = self._claim.with_name(f"{self._claim.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                text = format_json(facts | {"has_trained": self._order.has_trained})
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self._claim)
            finally:
                temporary.unlink(missing_ok=True)


def main() -> NoReturn:
    """Leave the process that has started this one, and wait for the end of the run."""
    if os.fork() > 0:
        os._exit(0)
    code = 1
    try:
        sentinel = Sentinel(_first_order(sys.stdin.fileno()), source=sys.stdin.fileno())
        sentinel.claim()
        os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        end = sentinel.wait()
        if end is not None:
            sentinel.run(end)
        sentinel.release()
        code = 0
    finally:
        os._exit(code)


def _first_order(source: int) -> EndHook:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(source, 1)
        if not byte:
            raise EOFError("the run has ended before it said what to do")
        line += byte
    return EndHook.from_plain(json.loads(line)["order"])


def _pass(number: int, frame: object) -> None:
    """Do nothing."""


def _lives(process: tuple[Any, Any] | Process) -> bool:
    pid, created = process
    if not isinstance(pid, int) or not isinstance(created, int | float):
        return False
    try:
        found = psutil.Process(pid)
        return bool(abs(found.create_time() - created) < 1.0 and found.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError):
        return False


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(_MAX_STATUS_BYTES) or b"null")
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


if __name__ == "__main__":
    main()
