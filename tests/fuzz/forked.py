"""Runs `finetune WORDS` again and again, each in a fork of a process that has imported everything already.

As a program it is the server: it reads one request a line, forks, and answers with what became of the command. As a
module it is the client. A start of Python with torch takes seconds, a fork takes milliseconds.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.surroundings import apply
from tests.present_stream import log_to_present_stream
from tests.verifier_server import use_server

PLAIN = ("finetune.cli.app", "finetune.run.start", "finetune.config.schema")
WITH_TORCH = (
    "finetune.cli.app",
    "finetune.run.start",
    "finetune.run.train",
    "finetune.commands.export",
    "finetune.commands.generate",
    "finetune.commands.evaluate",
    "finetune.commands.chat",
    "finetune.commands.checkpoints",
    "finetune.commands.prepare",
    "finetune.commands.preview.preview",
    "finetune.commands.checkpoints",
    "peft",
    "datasets",
    "PIL.Image",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
)
ADDRESS_SPACE_BYTES = 16 << 30  # a case may not take the machine with it
FILE_BYTES = 256 << 20
GRACE_SECONDS = 15.0  # for helpers to notice that their starter has gone
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """What became of a command; `code` is None where it had to be killed."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float  # of wall time
    cpu_seconds: float
    grown_bytes: int  # peak memory beyond what the server itself holds
    peak_bytes: int
    acts: tuple[tuple[str, str], ...]  # audited: files opened for writing, programs started, code run from a file
    left_running: bool  # a process of its group outlived it


class Server:
    """The client's end of a server; a context manager."""

    def __init__(self, modules: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.forked", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def run(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        stdin: bytes = b"",
        limit_seconds: float = 30.0,
        surroundings: str = "",
    ) -> Outcome:
        """Return what `finetune WORDS` comes to in that folder, which is its home and holds its temporary files.

        `surroundings` is one of tests/fuzz/surroundings.py, which the process finds at its start.
        """
        request = {
            "words": list(words),
            "folder": str(folder),
            "stdin": stdin.hex(),
            "limit_seconds": limit_seconds,
            "surroundings": surroundings,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        acts = tuple((event, path) for event, path in answer.pop("acts"))
        return Outcome(acts=acts, **answer)


def _serve(modules: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a case leaves behind becomes our child
    for name in modules:
        importlib.import_module(name)
    if "finetune.export.verify.verifier" in sys.modules:
        use_server(sys.modules["finetune.export.verify.verifier"])
    if "torch" in sys.modules:
        with sys.modules["torch"].profiler.record_function("first use"):  # imports a module of torch
            pass
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on the pipe
    for line in sys.stdin:
        answers.write(json.dumps(asdict(_forked(json.loads(line)))) + "\n")
        answers.flush()


def _forked(request: Mapping[str, Any]) -> Outcome:
    out, err, trail, given = (os.memfd_create(name) for name in ("stdout", "stderr", "trail", "stdin"))
    os.write(given, bytes.fromhex(request["stdin"]))
    os.lseek(given, 0, os.SEEK_SET)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number, descriptor in enumerate((given, out, err)):
                os.dup2(descriptor, number)
            _child(request["words"], folder=request["folder"], trail=trail, surroundings=request["surroundings"])
        finally:
            os._exit(99)
    in_time = _ended(pid, request["limit_seconds"])
    seconds = time.monotonic() - began
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    left_running = _group_lives(pid)  # first: what carries on the output of a full disk is then over
    outcome = Outcome(
        code=os.waitstatus_to_exitcode(status) if in_time else None,
        stdout=_text(out),
        stderr=_text(err),
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        grown_bytes=max(0, usage.ru_maxrss * 1024 - base),
        peak_bytes=usage.ru_maxrss * 1024,
        acts=tuple(json.loads(line) for line in _text(trail).splitlines()),
        left_running=left_running,
    )
    for descriptor in (out, err, trail, given):
        os.close(descriptor)
    return outcome


def _ended(pid: int, limit_seconds: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], limit_seconds)[0])
    finally:
        os.close(handle)


def _group_lives(pid: int) -> bool:
    """Tell whether a process of the group outlives its leader by more than it takes to notice that; then end it."""
    deadline = time.monotonic() + GRACE_SECONDS
    while _group_is_there(pid):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            return True
        time.sleep(0.005)
    return False


def _group_is_there(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _text(descriptor: int) -> str:
    size = os.lseek(descriptor, 0, os.SEEK_END)
    return os.pread(descriptor, size, 0).decode("utf-8", errors="replace")


def _child(words: Sequence[str], *, folder: str, trail: int, surroundings: str) -> None:
    home = Path(folder)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(home)
    os.environ |= {"HOME": folder, "TMPDIR": f"{folder}/tmp", "HF_HOME": f"{folder}/cache/hf", "PWD": folder}
    tempfile.tempdir = None  # the parent may have asked for it, which keeps its answer
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    sys.argv = ["finetune", *words]
    log_to_present_stream()
    _audit(trail)
    if surroundings:
        apply(surroundings)
    code: int | None = 1
    try:
        importlib.import_module("finetune.__main__").main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) or ended.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code or 0)


_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class")


def _audit(trail: int) -> None:
    """Have Python note whatever is written, started, or run as code that came from a file of the case."""
    folder = str(Path.cwd())

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        text = None
        if event == "open" and isinstance(arguments[0], str | bytes) and _writes(arguments):
            text = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100 - no I/O within an audit hook
        elif event in _CHANGES and isinstance(arguments[0], str | bytes | os.PathLike) and not _is_relative(arguments):
            text = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100
        elif event in _STARTS:
            text = str(arguments[:2])[:4000]
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(folder):
            text = arguments[0].co_filename
        if text is not None:
            os.write(trail, json.dumps((event, text)).encode() + b"\n")

    sys.addaudithook(note)


def _is_relative(arguments: tuple[Any, ...]) -> bool:
    """Tell whether the path counts from an open folder, as in `shutil.rmtree`: what is gone shows in the listing."""
    return isinstance(arguments[-1], int) and arguments[-1] >= 0 and not str(arguments[0]).startswith("/")


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


if __name__ == "__main__":
    _serve(sys.argv[1:])
