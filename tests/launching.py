"""How tests start `python ...`: in a fork of the warm server where that is the same, else in a fresh interpreter.

`run` and `capture` wait for the end, `begin` does not. `is_cold=True` takes a fresh interpreter whatever it costs: for
tests of the launcher, of imports and of what a process is at its start. `pytest --cold` has all of them do so. The
server starts those, too: when pytest is killed, it leaves none of their processes running.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
from filelock import FileLock

from finetune.runtime.processes import free_loopback_port
from tests.warm import fixed

ROOT = Path(__file__).parents[1]
SETTINGS = {
    **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},  # several processes share the cores
    "PYTHONFAULTHANDLER": "1",  # a process that takes too long prints its stacks
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking whether there is a device leaves a process fit to be forked
    **dict.fromkeys(("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1"),  # a run sets them, too
}
"""What every process of these tests has in its environment."""

ADDRESS = "FINETUNE_TESTS_WARM"
"""The variable that names the server's socket; empty: every program gets a fresh interpreter."""

OWNER = "FINETUNE_TESTS_OWNER"
"""The variable with the pid of pytest's first process, with which the server ends."""

_SECONDS_TO_IMPORT = 120.0


class WarmProcess:
    """A program that the server starts, forked or in a fresh interpreter, as `subprocess.Popen` shows one."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        streams: Sequence[int],
        is_cold: bool,
    ) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self.cpu_seconds = 0.0
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(_server()))
        request = {"command": self.args, "environment": dict(environment), "folder": str(folder), "is_cold": is_cold}
        socket.send_fds(self._server, [json.dumps(request).encode()], streams)
        self._answers = self._server.makefile()
        self.pid: int = json.loads(self._answers.readline())["pid"]

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            result = json.loads(self._answers.readline())
            self.returncode, self.cpu_seconds = int(result["code"]), float(result["cpu_seconds"])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the program alone a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program alone."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left of the program and of all that it has started."""
        self._answers.close()
        self._server.close()


class ColdProcess(subprocess.Popen[bytes]):
    """A program in a fresh interpreter and a session of its own."""

    def end(self) -> None:
        """Kill its group; ranks of a launcher end with the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


Process = WarmProcess | ColdProcess


def begin(
    command: Sequence[str],
    *,
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    is_cold: bool = False,
) -> Process:
    """Start a Python program whose output goes to these files (errors: with the output); who begins it calls `end`."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("FSDP_")
    }  # an Accelerator sets some
    variables = {**own, **SETTINGS, **(environment or {})}
    out, err = output.fileno(), (errors or output).fileno()
    if not os.environ.get(ADDRESS):
        nothing = subprocess.DEVNULL
        return ColdProcess(
            list(command), stdin=nothing, stdout=out, stderr=err, env=variables, cwd=folder, start_new_session=True
        )
    is_cold = is_cold or command[0] != sys.executable or fixed(variables) != _server_variables()
    with Path(os.devnull).open("rb") as nothing_to_read:
        streams = (nothing_to_read.fileno(), out, err)
        return WarmProcess(command, environment=variables, folder=folder, streams=streams, is_cold=is_cold)


def run(
    command: Sequence[str],
    *,
    log: Path,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    is_cold: bool = False,
) -> int:
    """Run a Python program to its end, its output in `log`; return its exit code, or 124 when it took too long.

    Whatever happens, no process of it is left behind.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = begin(command, output=output, environment=environment, folder=folder, is_cold=is_cold)
    try:
        return process.wait(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        _print_stacks(process.pid)
        return 124
    finally:
        process.end()


def capture(
    command: Sequence[str],
    *,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    is_cold: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program to its end and return exit code, output and errors, as `subprocess.run` would.

    One that takes too long fails the test, with what it printed and the stacks of all its processes.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = begin(command, output=output, errors=errors, environment=environment, folder=folder, is_cold=is_cold)
        code = None
        try:
            code = process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            _print_stacks(process.pid)
        finally:
            process.end()
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
    assert code is not None, "\n".join((f"{command} took more than {timeout_seconds:.0f} seconds", *texts))
    return subprocess.CompletedProcess(list(command), code, *texts)


def start_warm_server() -> None:
    """Start the server, which otherwise the first program starts, unless every program gets a fresh interpreter."""
    if os.environ.get(ADDRESS):
        _server()


def _print_stacks(pid: int) -> None:
    """Have a process and all that it has started print the stacks of their threads, one after the other, and end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in processes:
            process.suspend()  # so that no launcher ends its ranks before they have printed
        for process in processes:
            process.send_signal(signal.SIGABRT)
            process.resume()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(1.0)


def accelerate_command(strategy: str, *words: str, processes: int = 2) -> list[str]:
    """Return the command that launches `python WORDS` under an accelerate config, by its name or path."""
    config = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    return [*command, "--main_process_port", str(free_loopback_port()), "--config_file", str(config), *words]


def torchrun_command(*words: str, processes: int = 2) -> list[str]:
    """Return the command that starts `python WORDS` on several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return [*command, f"--master_port={free_loopback_port()}", *words]


@functools.cache
def _server_variables() -> dict[str, str]:
    _server()
    found: dict[str, str] = json.loads(Path(os.environ[ADDRESS]).with_suffix(".json").read_text())
    return found


@functools.cache
def _server() -> Path:
    """Return the address of the server, which the first who asks has started."""
    address = Path(os.environ[ADDRESS])
    with FileLock(address.with_suffix(".lock")):
        if not address.with_suffix(".json").exists():
            _start_server(address)
    return address


def _start_server(address: Path) -> None:
    command = [sys.executable, "-m", "tests.warm", str(address), os.environ[OWNER]]
    log = address.with_suffix(".log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **SETTINGS},
            cwd=ROOT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _SECONDS_TO_IMPORT
    while not address.with_suffix(".json").exists():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)
