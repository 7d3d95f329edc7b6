"""Runs the user's command: its output in a log, without secrets; killed with all it has started at its time limit."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from finetune.runtime.text.terminal import printable

_MAX_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16

TIMED_OUT = 124

OF_A_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)
_BEGINNINGS = ("TORCHELASTIC_", "ACCELERATE_", "ROLE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCH_NCCL_")


class EndLog:
    """A file in the run's folder; where nothing can be written, as on a full disk, the command is run without it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        """Append the lines."""
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags, 0o644), "a", encoding="utf-8", errors="replace") as file:
                file.write(text.rstrip("\n") + "\n")


def command_environment(variables: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: that of the run, without what makes a process a rank, and the facts."""
    plain = {
        name: value
        for name, value in variables.items()
        if name not in OF_A_LAUNCHER and not name.startswith(_BEGINNINGS)
    }
    return plain | dict(facts)


def run_command(
    command: str, *, environment: Mapping[str, str], log: Callable[[str], None], timeout_seconds: float
) -> int:
    """Run the command by `/bin/sh` and return its exit code, 124 where it took too long, 127 where it cannot run."""
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
    try:
        return _follow(process, log=log, deadline=time.monotonic() + timeout_seconds)
    finally:
        if process.stdout is not None:
            process.stdout.close()


def _follow(process: "subprocess.Popen[bytes]", *, log: Callable[[str], None], deadline: float) -> int:
    """Log whole lines as they come, until the shell has ended; what it left in the background may go on."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    os.set_blocking(output, False)
    rest, left, code = b"", _MAX_BYTES, None
    while code is None:
        select.select([output], [], [], 0.1)
        code = process.poll()
        if code is None and time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = TIMED_OUT
        content, is_over = _read(output)
        if is_over and code is None:
            time.sleep(0.1)  # nothing more will come, and `select` returns at once
        shown = content[: max(left, 0)]
        left -= len(content)
        whole, end, rest = (rest + shown).rpartition(b"\n")
        if end or len(rest) > _CHUNK_BYTES:
            rest = rest if end else _log_bytes(rest, log)
            _log_bytes(whole, log)
    _log_bytes(rest, log)
    if left < 0:
        log(f"(and {-left:,} bytes more)")
    return code


def _read(output: int) -> tuple[bytes, bool]:
    """Return what there is to read now, and whether that was all."""
    found = b""
    with suppress(BlockingIOError):
        while chunk := os.read(output, _CHUNK_BYTES):
            found += chunk
            if len(found) > _MAX_BYTES:
                return found, False
        return found, True
    return found, False


def _log_bytes(content: bytes, log: Callable[[str], None]) -> bytes:
    if content:
        log(printable(content.decode("utf-8", errors="replace")))
    return b""
