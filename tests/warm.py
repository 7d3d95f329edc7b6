"""Runs `python ...` again and again, each time in a fork of a process that has imported everything already.

`python -m tests.warm SOCKET PID` is the server; it lives as long as the process PID. A client connects to the socket,
sends one request with its standard streams, and reads the program's pid and, later, its exit code. When the client
hangs up, the program and all that it has started are killed. Importing torch, transformers, accelerate and DeepSpeed
takes a fresh interpreter 4 to 8 seconds of CPU; a fork takes milliseconds.

A program finds what a fresh interpreter would give it: arguments, environment, working folder, signal handlers, its own
`__main__`, and no descriptors but the standard streams. `accelerate launch` and `torchrun` run as they are, with their
agent and rendezvous; only where they would start the interpreter for a rank they fork, too. Two things differ from a
fresh process: libraries are imported already, so that variables which they read then cannot be set (`FIXED`), and all
processes share one seed of string hashes. The server itself starts no thread, process group or device; where a library
has one looked at that cannot be used in a fork, the program gets a fresh interpreter after all.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from finetune.runtime.upstream import extensions_folder
from tests.present_stream import log_to_present_stream
from tests.verifier_server import start_server, use_server

MODULES = (
    *("finetune.cli.app", "finetune.run.start", "finetune.run.train"),
    *("accelerate.commands.launch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint.state_dict", "torch._dynamo", "peft", "datasets", "pyarrow.parquet"),
    *(
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.zero.stage_1_and_2",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"),
)
"""What is imported before the first fork; what a machine lacks is left out."""

FIXED = (
    *("PYTHON", "HF_", "TRANSFORMERS_", "LC_", "LANG", "TORCH_", "TORCHDYNAMO_", "OMP_", "PYTORCH_"),
    *(("CUDA_VISIBLE_",) if Path("/dev/nvidiactl").exists() else ()),
)
"""How the names of variables begin that are read when the interpreter starts or a library is imported."""

_HEADER_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program cannot have otherwise than the server has them; it may add to PYTHONPATH."""
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(FIXED)}
    found.pop("PYTHONPATH", None)
    return found


def serve(address: Path, owner: int) -> None:
    """Answer requests until the owner has gone."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _fork_ranks()
    _fork_children()
    start_server()
    use_server(importlib.import_module("finetune.export.verify.verifier"))
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the attendants
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for pytest, which ends what it has begun
    owner_handle = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(64)
        written = address.with_suffix(".new")
        written.write_text(json.dumps(fixed(os.environ)))
        written.rename(address.with_suffix(".json"))  # clients see a whole file
        _compile_kernels()
        while owner_handle not in select.select([listening, owner_handle], [], [])[0]:
            client, _ = listening.accept()
            if _fork() == 0:
                listening.close()
                _attend(client)
            client.close()


def _compile_kernels() -> None:
    """Have a child compile what DeepSpeed does on a fresh machine, beside the first tests; it ends with this process.

    Whoever needs it first would wait for it for minutes, and both workers of pytest need it early.
    """
    is_built = any(extensions_folder().glob("*/deepspeed_shm_comm/*.so"))
    if is_built or "deepspeed" not in sys.modules or _fork() != 0:
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        importlib.import_module("deepspeed.comm.torch").build_shm_op()
    finally:
        os._exit(0)


def _attend(client: socket.socket) -> NoReturn:
    """Start a client's program, say how it ends, and when the client hangs up leave nothing of it running."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whom a launcher leaves behind becomes our child
        header, streams, _, _ = socket.recv_fds(client, _HEADER_BYTES, 3)
        request = json.loads(header)
        pid = _fork()
        if pid == 0:
            os.setsid()
            become(**request, streams=streams)
        for stream in streams:
            os.close(stream)
        client.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        handle = os.pidfd_open(pid)
        if handle in select.select([handle, client], [], [])[0]:
            _, status, usage = os.wait4(pid, 0)
            result = {"code": os.waitstatus_to_exitcode(status), "cpu_seconds": usage.ru_utime + usage.ru_stime}
            client.sendall(json.dumps(result).encode() + b"\n")
            client.recv(1)
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():  # of threads, which from Python 3.12 on are warned of: those of libraries wait here
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    streams: Sequence[int] = (0, 1, 2),
    is_cold: bool = False,
) -> NoReturn:
    """Be the program `command`, whose first word is the interpreter; this process ends with it.

    Where it `is_cold`, or this process has lost its GPU, the program is executed: it begins as a fresh interpreter.
    """
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in added if path and path not in sys.path]
        if is_cold or _has_lost_its_device():
            os.execvpe(command[0], list(command), dict(environment))
        code = _run(list(command[1:]))
    finally:
        os._exit(code)


def _has_lost_its_device() -> bool:
    """Tell whether the process that forked this one has looked at a GPU so that no fork can use it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _run(words: list[str]) -> int:
    """Do what `python WORDS` does, to the end of the interpreter, and return the exit code."""
    is_unbuffered = words[0] == "-u"
    _open_streams(is_unbuffered=is_unbuffered)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.disable()  # its handlers of signals went with the fork's
        faulthandler.enable()
    log_to_present_stream()
    code = 0
    try:
        _execute(words[1:] if is_unbuffered else words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


def _execute(words: list[str]) -> None:
    first, rest = words[0], words[1:]
    if first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        sys.modules.pop(rest[0], None)  # it has been imported; a fresh interpreter finds it for the first time
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = words, str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _open_streams(*, is_unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    sys.stdout.reconfigure(write_through=is_unbuffered)  # type: ignore[union-attr]


class _Rank:
    """What torchelastic needs of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def _fork_ranks() -> None:
    """Have torchelastic's agent fork ranks. It starts them in one method of its own, in a session of their own.

    A rank begins when all have been forked. Until then none connects to the agent's store, whose thread looks up the
    names of its clients: a rank that is forked meanwhile inherits the locked mutex of the resolver, and hangs there.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start = SubprocessContext._start
    gate: list[int] = []

    def start_together(context: SubprocessContext) -> None:
        gate[:] = os.pipe()
        try:
            start(context)
        finally:
            for end in gate:
                os.close(end)

    def fork(_: Any, args: Sequence[str], env: Mapping[str, str]) -> _Rank:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if pid == 0:
            os.setsid()
            reading, writing = gate
            os.close(writing)
            os.read(reading, 1)  # ends when the agent closes the other end, or itself ends
            become(args, environment=env, folder=str(Path.cwd()))
        return _Rank(pid)

    assert callable(SubprocessHandler._popen), "torchelastic starts its ranks elsewhere now"
    SubprocessContext._start = start_together
    SubprocessHandler._popen = fork


def _fork_children() -> None:
    """Have the server start what a program starts as its child, such as the runs of `finetune verify`."""
    from finetune.launch import child
    from tests import launching

    def start(command: Sequence[str], *, stdout: Any, env: Mapping[str, str], **others: Any) -> Any:
        if stdout is None:  # a terminal's
            return subprocess.Popen(command, stdout=stdout, env=env, **others)
        return launching.begin(command, output=stdout, environment=env, folder=Path.cwd())

    child.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[assignment]


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
