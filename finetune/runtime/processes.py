"""Commands of several processes, started as one group and ended as one."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_group(
    command: Sequence[str],
    *,
    log: Path,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> int:
    """Run the command in `folder`, its output in `log`; return its exit code, or 124 when it took too long.

    Whatever happens, no process of the group is left behind.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _kill_group(process)


def free_port() -> int:
    """Return a TCP port on which nobody listens right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
