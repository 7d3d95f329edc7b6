"""The process that outlives a run: it determines how the run ended, and runs the command of `run.on_end`.

It reads messages on standard input, one JSON object per line. The `hook` comes first, then `beat` for progress,
`processes` once all ranks are known, `has_trained`, `end` with the end of the run, and `call_off`. SIGTERM also calls
it off. It does not import torch.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from finetune.runtime.optional import no_op
from finetune.runtime.text.redact import redact_foreign
from finetune.runtime.text.terminal import format_json, printable

OUTCOMES = ("finished", "failed", "failed_start", "stopped", "interrupted", "idle")
KILLED = "killed"
WAIT, LEAVE = "wait", "leave"

_MAX_REASON_LENGTH = 100

Process = Sequence[float]
"""The pid and creation time (unix seconds) of a process, since pids are reused."""


@dataclass(frozen=True)
class EndHook:
    """The command and the run that it belongs to, as plain values that are sent as JSON. Durations in seconds."""

    command: str
    when: Sequence[str]
    restart_seconds: float
    idle_after_seconds: float
    timeout_seconds: float
    run_folder: str
    log: str  # file for the command's output
    host: str
    launch: str  # as in status.json
    url: str = ""  # to which the run is uploaded
    processes: Sequence[Process] = ()  # ranks of this host
    launchers: Sequence[Process] = ()  # that may start the run again
    has_trained: bool = False  # in this start, or one that it replaces


@dataclass(frozen=True)
class RunEnd:
    """The end of the run on this machine."""

    outcome: str
    reason: str
    exit_code: int
    step: int = 0


def next_action(
    end: RunEnd, hook: EndHook, *, is_alive: bool, quiet_seconds: float, ended_seconds: float = 0.0
) -> str | RunEnd:
    """Return WAIT, LEAVE if there is nothing left to do, or the end for which the command is due now.

    `is_alive`: a process of the run, or a launcher that may start it again, exists on this machine. `quiet_seconds` is
    the time since the last sign of progress, `ended_seconds` the time since no process has been alive.
    """
    if is_alive:
        is_idle = "idle" in hook.when and quiet_seconds > hook.idle_after_seconds
        return RunEnd("idle", "no progress", 1, end.step) if is_idle else WAIT
    if end.outcome not in hook.when:
        return LEAVE
    return end if end.outcome == "finished" or ended_seconds >= hook.restart_seconds else WAIT


def end_of_run(announced: Mapping[str, Any] | None, status: Mapping[str, Any], *, hook: EndHook) -> RunEnd:
    """Return the end of the run that its process announced last, else that of status.json.

    The status of another launch is ignored. A status without an end belongs to a killed run.
    """
    facts = status if status.get("launch") == hook.launch else {}
    step = _whole(facts.get("step"), 0)
    failed = "failed" if hook.has_trained else "failed_start"
    source = announced or facts
    state, code, reason = source.get("state"), _whole(source.get("exit_code"), 1), _plain_words(source.get("reason"))
    if state == "finished" and announced is not None:
        if code == 0:
            return RunEnd("finished", reason, 0, step)
        return RunEnd("failed", "not everything was uploaded", code, step)
    if state == "stopped" and code != 1:
        is_by_user = reason in ("signal SIGINT", "interrupted")
        return RunEnd("interrupted" if is_by_user else "stopped", reason, code, step)
    if state in ("stopped", "failed"):
        error = facts.get("error")
        error_type = _plain_words(error.get("type")) if isinstance(error, Mapping) else ""
        return RunEnd(failed, error_type or reason or "error", code or 1, step)
    return RunEnd(failed, KILLED, 1, step)


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _plain_words(value: Any) -> str:
    """Return a reason without special characters, since it may be the name of any exception.

    >>> _plain_words("signal SIGTERM"), _plain_words("$(reboot)")
    ('signal SIGTERM', 'reboot')
    """
    return re.sub(r"[^\w .-]", "", str(value))[:_MAX_REASON_LENGTH].strip() if isinstance(value, str) else ""


TIMED_OUT = 124

_MAX_BYTES = 1 << 20
_MAX_LINE = 1 << 16
_DRAIN_SECONDS = 0.2
"""Time to log the last lines; a background process of the command may keep the output open."""

_LAUNCHER_VARIABLE = re.compile(
    r"((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|CROSS_(RANK|SIZE)"
    r"|(TORCHELASTIC|ACCELERATE|ROLE|FSDP|PARALLELISM_CONFIG|TORCH_NCCL)_.*"
)


def append_line(path: Path, text: str) -> None:
    """Append the text to a log in the run folder; errors, as of a full disk, are ignored."""
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8", errors="replace") as file:
            file.write(text.rstrip("\n") + "\n")


def command_environment(variables: Mapping[str, str], end: RunEnd, hook: EndHook) -> dict[str, str]:
    """Return the environment of the command: that of the run without variables of launchers, and the end of the run."""
    plain = {name: value for name, value in variables.items() if not _LAUNCHER_VARIABLE.fullmatch(name)}
    return plain | {
        "FINETUNE_OUTCOME": end.outcome,
        "FINETUNE_REASON": end.reason,
        "FINETUNE_EXIT_CODE": str(end.exit_code),
        "FINETUNE_STEP": str(end.step),
        "FINETUNE_RUN_FOLDER": hook.run_folder,
        "FINETUNE_RUN_URL": hook.url,
        "FINETUNE_STATUS_FILE": f"{hook.run_folder}/status.json",
    }


def run_command(
    command: str, *, environment: Mapping[str, str], log: Callable[[str], None], timeout_seconds: float
) -> int:
    """Run the command by `/bin/sh`; return its exit code, 124 after a timeout, 127 if it cannot be run."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        log(printable(f"{type(error).__name__}: {error}"))
        return 127
    assert process.stdout is not None
    stream: IO[bytes] = process.stdout

    def log_output() -> None:
        """Log each line immediately, up to a limit, and the number of omitted bytes."""
        num_bytes = 0
        while line := stream.readline(_MAX_LINE):
            if num_bytes < _MAX_BYTES:
                log(printable(redact_foreign(line.rstrip(b"\n").decode("utf-8", errors="replace"))))
            num_bytes += len(line)
        if num_bytes > _MAX_BYTES:
            log(f"(truncated after {_MAX_BYTES:,} of {num_bytes:,} bytes)")

    output = threading.Thread(target=log_output, daemon=True)
    output.start()
    try:
        code = process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = TIMED_OUT
    output.join(_DRAIN_SECONDS)
    return code


REPLACED = signal.SIGUSR1
"""Sent to the sentinel of an earlier start by that of a new one."""

_TICK_SECONDS = 1.0
_SUSPENDED_SECONDS = 30.0  # between two ticks: the machine or this process was suspended, so the run was not idle
_EXIT_SECONDS = 60.0  # after a process has announced its end; one that exists longer is ignored
_MAX_STATUS_BYTES = 4 << 20


class Sentinel:
    """Waits for the end of one run on this machine."""

    hook: EndHook  # updated by the messages of the run
    _claim: Path  # which names the sentinel of this machine that runs the command

    def __init__(self, source: int) -> None:
        """`source` is the descriptor of the run's messages; waits for the first one, raises EOFError without it."""
        self._source: int | None = source
        self._buffer = b""
        self._announced: Mapping[str, Any] | None = None
        self._announced_at = self._ended_at = float("inf")
        self._last_beat = self._last_tick = time.monotonic()
        self._is_over = False  # called off, or replaced
        while not hasattr(self, "hook"):
            if self._source is None:
                raise EOFError("the run ended before it sent its hook")
            self._read(self._source)

    def claim(self) -> None:
        """Take over from the sentinel of an earlier start on this machine, and end it."""
        for number in (signal.SIGTERM, REPLACED):
            signal.signal(number, self._end_by_signal)
        earlier = _read_object(self._claim)
        if earlier.get("launch") != self.hook.launch and _is_running((earlier.get("pid"), earlier.get("created"))):
            self.hook = replace(self.hook, has_trained=self.hook.has_trained or earlier.get("has_trained") is True)
            with suppress(OSError):
                os.kill(earlier["pid"], REPLACED)
        self._write_claim()

    def wait(self) -> RunEnd | None:
        """Return the end for which the command is due; None if there is nothing to do."""
        while not self._is_over:
            if self._source is None:
                time.sleep(_TICK_SECONDS)
            elif select.select([self._source], [], [], _TICK_SECONDS)[0]:
                self._read(self._source)
            action = self._next_action(time.monotonic())
            if action != WAIT and not self._is_over:
                return action if isinstance(action, RunEnd) else None
        return None

    def run(self, end: RunEnd) -> None:
        """Run the command, once, and log the result."""
        for number in (signal.SIGTERM, REPLACED):
            signal.signal(number, no_op)  # the command would inherit ignored signals
        facts = f"{end.outcome} ({end.reason}, step {end.step}, exit code {end.exit_code})"
        self._log(f"{facts}; runs {printable(redact_foreign(self.hook.command))}")
        started = time.monotonic()
        code = run_command(
            self.hook.command,
            environment=command_environment(os.environ, end, self.hook),
            log=partial(append_line, Path(self.hook.log)),
            timeout_seconds=self.hook.timeout_seconds,
        )
        seconds = time.monotonic() - started
        if code == TIMED_OUT:
            self._log(f"warning: the command was killed after {seconds:.1f} s (run.on_end.timeout_seconds)")
        elif code:
            self._log(f"warning: the command failed with exit code {code} after {seconds:.1f} s")
        else:
            self._log(f"done after {seconds:.1f} s")

    def release(self) -> None:
        """Remove the claim, unless another sentinel has taken over."""
        if _read_object(self._claim).get("pid") == os.getpid():
            with suppress(OSError):
                self._claim.unlink()

    def _end_by_signal(self, number: int, frame: object) -> None:
        self._is_over = True
        if number != REPLACED:
            self._log(f"called off by {signal.Signals(number).name}")

    def _log(self, text: str) -> None:
        append_line(Path(self.hook.log), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC} {self.hook.host}: {text}")

    def _next_action(self, now: float) -> str | RunEnd:
        if now - self._last_tick > _SUSPENDED_SECONDS:
            self._last_beat = now
        self._last_tick = now
        processes = self.hook.processes if now - self._announced_at < _EXIT_SECONDS else ()
        is_alive = any(map(_is_running, (*self.hook.launchers, *processes)))
        while not is_alive and self._source is not None and select.select([self._source], [], [], 0)[0]:
            self._read(self._source)  # the last message of a process that has just ended
        self._ended_at = float("inf") if is_alive else min(self._ended_at, now)
        status = _read_object(Path(self.hook.run_folder) / "status.json")
        return next_action(
            end_of_run(self._announced, status, hook=self.hook),
            self.hook,
            is_alive=is_alive,
            quiet_seconds=now - self._last_beat,
            ended_seconds=now - self._ended_at,
        )

    def _read(self, source: int) -> None:
        content = os.read(source, 1 << 16)
        if not content:
            self._source = None
        *lines, self._buffer = (self._buffer + content).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                message = json.loads(line)
                self._last_beat = time.monotonic()
                if "hook" in message:
                    self.hook = EndHook(**message["hook"])
                    self._claim = Path(self.hook.run_folder) / f".on_end-{self.hook.host}.json"
                if "processes" in message:
                    self.hook = replace(self.hook, processes=message["processes"])
                if "has_trained" in message:
                    self.hook = replace(self.hook, has_trained=True)
                    self._write_claim()
                if "end" in message:
                    self._announced, self._announced_at = dict(message["end"]), time.monotonic()
                self._is_over = self._is_over or "call_off" in message

    def _write_claim(self) -> None:
        facts = {"pid": os.getpid(), "created": psutil.Process().create_time(), "launch": self.hook.launch}
        temporary = self._claim.with_name(f"{self._claim.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                temporary.write_text(format_json(facts | {"has_trained": self.hook.has_trained}), encoding="utf-8")
                temporary.replace(self._claim)
            finally:
                temporary.unlink(missing_ok=True)


def main() -> NoReturn:
    """Detach from the parent process, and wait for the end of the run."""
    if os.fork() > 0:
        os._exit(0)
    code = 1
    try:
        sentinel = Sentinel(sys.stdin.fileno())
        sentinel.claim()
        os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end = sentinel.wait()
        if end is not None:
            sentinel.run(end)
        sentinel.release()
        code = 0
    finally:
        os._exit(code)


def _is_running(process: Any) -> bool:
    """Return whether the process with this number and creation time exists; False for damaged values."""
    try:
        pid, created = process
        running = psutil.Process(pid)
        return bool(abs(running.create_time() - created) < 1.0 and running.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, TypeError, OverflowError):
        return False


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            value = json.loads(file.read(_MAX_STATUS_BYTES) or b"null")
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    main()
