"""Child runs: the command that trains a job, and its process; all its descendants end with it.

A child has a session of its own, so that Ctrl-C reaches only the parent. When the parent dies, the kernel sends the
child SIGTERM: a run saves a checkpoint then, and ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil

TIMEOUT_EXIT_CODE = 124

_TAIL_BYTES = 20_000

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)  # opened here: a process that has just been forked should not
_KILLED_SECONDS = 10.0  # until a killed process has exited; one that waits for a dead disk takes longer


def train_command(
    config: Path,
    *,
    overrides: Sequence[str] = (),
    accelerate_config: Path | None = None,
    num_processes: int = 1,
    port: int | None = None,
) -> list[str]:
    """Return the command that trains the job on this machine.

    It is trained in this number of processes by `accelerate launch`, or, without an accelerate config, by torchrun if
    there are several; `port` is that of their rendezvous.
    """
    command = [sys.executable]
    if accelerate_config is not None:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(accelerate_config)]
        command += ["--num_processes", str(num_processes), "--main_process_port", str(port)]
    elif num_processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={num_processes}"]
        command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    command += ["-m", "finetune", "train", "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    return command


def start_child(
    command: Sequence[str], *, log: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the command with these additions to the environment; its output is appended to the log, where one is named.

    Call it from a thread that lives as long as the child should.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=partial(_terminate_with_parent, os.getpid()),
        )


def kill_child(process: "subprocess.Popen[bytes]") -> None:
    """Kill the child and all processes that it has started: a launcher starts each rank in a session of its own."""
    descendants: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):  # processes whose parent has ended are still in its group
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.Error):
            descendant.kill()
    psutil.wait_procs(descendants, timeout=_KILLED_SECONDS)
    process.wait()


def end_of_log(log: Path, *, max_lines: int = 12) -> str:
    """Return the last error that a child has printed, or the last lines of its log; empty if it cannot be read.

    A launcher prints a traceback of its own after the error of a rank.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    first = errors[-1] if errors else max(0, len(lines) - max_lines)
    return "\n".join(lines[first:][:max_lines]).removeprefix("error: ")


@contextmanager
def child_process(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the command, its output in a new log; no process of it is left at the end."""
    log.unlink(missing_ok=True)
    process = start_child(command, log=log, environment=environment)
    try:
        yield process
    finally:
        kill_child(process)


def run_child(
    command: Sequence[str], *, log: Path, timeout_seconds: float, environment: Mapping[str, str] | None = None
) -> int:
    """Run the command, its output in a new log; return its exit code, or 124 after a timeout."""
    with child_process(command, log=log, environment=environment) as process:
        try:
            return process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return TIMEOUT_EXIT_CODE


def _terminate_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call, so the kernel sends no signal
        os.kill(os.getpid(), signal.SIGTERM)
