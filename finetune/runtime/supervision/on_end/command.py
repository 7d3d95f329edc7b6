"""Runs the user's command: its output in a log, without secrets; killed with all it has started at its time limit."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from finetune.runtime.text.terminal import printable

TIMED_OUT = 124

_MAX_BYTES = 1 << 20
_MAX_LINE = 1 << 16
_DRAIN_SECONDS = 0.2
"""To log the last lines; a process that the command left in the background may hold the output open."""

_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CROSS_RANK",
    "CROSS_SIZE",
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "ROLE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCH_NCCL_")


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
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return plain | dict(facts)


def run_command(
    command: str, *, environment: Mapping[str, str], log: Callable[[str], None], timeout_seconds: float
) -> int:
    """Run the command by `/bin/sh`; return its exit code, 124 after a timeout, 127 where it cannot be run."""
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
    output = threading.Thread(target=_log_output, args=(process.stdout, log), daemon=True)
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


def _log_output(stream: IO[bytes], log: Callable[[str], None]) -> None:
    """Log each line when it comes, up to a limit, and then how much was left out."""
    num_bytes = 0
    while line := stream.readline(_MAX_LINE):
        if num_bytes < _MAX_BYTES:
            log(printable(line.rstrip(b"\n").decode("utf-8", errors="replace")))
        num_bytes += len(line)
    if num_bytes > _MAX_BYTES:
        log(f"(cut after {_MAX_BYTES:,} of {num_bytes:,} bytes)")
