"""Forks the program that verifies exports from one process that has imported torch, transformers and peft only.

`python -P tests/verifier_server.py SOCKET PID` is the server; it ends with the process PID. Each export still gets a
process of its own, into which no module of ours has been imported; the imports alone are shared, 4 to 8 seconds.
`use_server` has this process ask it; tests of the program itself take a fresh interpreter.
"""

import contextlib
import importlib.util
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "finetune" / "export" / "verify" / "program.py"

ADDRESS = "FINETUNE_TESTS_VERIFIER"
"""The variable that names the server's socket; empty: every verification gets a fresh interpreter."""

OWNER = f"{ADDRESS}_OWNER"
"""The variable with the pid of the process with which the server ends."""

_SECONDS_TO_START = 180.0


class ForkedProgram:
    """A process that verifies one export, as `subprocess.Popen` shows one."""

    def __init__(self, address: Path) -> None:
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(address))

    def communicate(self, line: bytes, *, timeout: float) -> None:
        """Send the request and wait for the end; raises TimeoutExpired."""
        self._server.sendall(line)
        self._server.settimeout(timeout)
        try:
            self.wait()
        except TimeoutError:
            raise subprocess.TimeoutExpired("verify", timeout) from None

    def poll(self) -> int | None:
        """Return the exit code; None before the end."""
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        if self.returncode is None:
            with contextlib.suppress(ConnectionError):
                self.returncode = int(json.loads(self._server.recv(64) or b"1"))
            self._server.close()
        return self.returncode or 0

    def kill(self) -> None:
        """Hang up: nobody waits for it any more."""
        self.returncode = -9
        self._server.close()


def use_server(verifier: ModuleType) -> None:
    """Have `finetune.export.verify.verifier` ask the server named in the environment, if there is one."""
    if not os.environ.get(ADDRESS):
        return

    def start(words: Sequence[str], *, log: int) -> ForkedProgram:
        return ForkedProgram(started_server())

    verifier.start_program = start  # type: ignore[attr-defined]


def started_server() -> Path:
    """Return the address of the running server."""
    address = Path(os.environ[ADDRESS])
    if not address.exists():
        start_server()
    deadline = time.monotonic() + _SECONDS_TO_START
    while not address.exists():
        assert time.monotonic() < deadline, "the server of verifications does not start"
        time.sleep(0.05)
    return address


def start_server() -> None:
    """Start the server unless somebody has, or none is wanted; by a process whose children are not killed before it."""
    if not os.environ.get(ADDRESS):
        return
    address = Path(os.environ[ADDRESS])
    with contextlib.suppress(FileExistsError):
        address.with_suffix(".claimed").touch(exist_ok=False)
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        words = [sys.executable, "-P", str(Path(__file__)), str(address), os.environ[OWNER]]
        subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)


def serve(address: Path, owner: int) -> None:
    """Verify exports until the owner has ended."""
    program = _load_program()
    assert not any(name == "finetune" or name.startswith("finetune.") for name in sys.modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    handle = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as listening:
        staging = address.with_suffix(".binding")
        listening.bind(str(staging))
        listening.listen(64)
        staging.rename(address)
        while handle not in select.select([listening, handle], [], [])[0]:
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _verify(program, client)
            client.close()


def _verify(program: ModuleType, client: socket.socket) -> None:
    code = 1
    try:
        line = client.makefile().readline()
        log = os.open(Path(line.strip()).with_name("log.txt") if line else os.devnull, os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin = io.StringIO(line)
        program.main()
        code = 0
    finally:
        with contextlib.suppress(OSError):
            client.sendall(json.dumps(code).encode())
        os._exit(code)


def _load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verifier_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.peft = importlib.import_module("peft")  # type: ignore[attr-defined]
    transformers = importlib.import_module("transformers")
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "GenerationConfig"):
        getattr(transformers, name)
    return program


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
