"""The sandbox process that runs templates: limited memory, no torch, exits with the process that started it.

A request is a pickle of (function, arguments), an answer is JSON: `{"made": ...}` or the exception, each with the
`seconds` of CPU time. Both are preceded by their length.
"""

import json
import os
import pickle
import resource
import struct
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from finetune.runtime.processes import ignore_run_signals

MAX_BYTES = 512 << 20
"""The memory that templates may use in addition to the process's memory at its start."""

_MAX_ANSWER_BYTES = 1 << 28
_LENGTH = struct.Struct("<Q")


def main(pipe: int) -> None:
    """Answer requests on standard input until it is closed, or until the other end of the pipe is closed."""
    threading.Thread(target=_exit_with_starter, args=(pipe,), daemon=True).start()
    ignore_run_signals()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed output must not become part of an answer
    is_limited = False
    while (content := receive(requests)) is not None:
        run, arguments = pickle.loads(content)
        if not is_limited:
            _limit_memory()
            is_limited = True
        send(answers, _answer(run, arguments))


def send(stream: IO[bytes], content: bytes) -> None:
    """Write the content, preceded by its length."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read the content of one `send`; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    content = stream.read(size)
    return content if len(content) == size else None


def _answer(run: Any, arguments: tuple[Any, ...]) -> bytes:
    start = time.process_time()
    try:
        result = run(*arguments)
        answer = json.dumps({"made": result, "seconds": time.process_time() - start}).encode()
        return answer if len(answer) <= _MAX_ANSWER_BYTES else json.dumps({"memory": True}).encode()
    except MemoryError:
        return json.dumps({"memory": True}).encode()
    except Exception as error:  # templates can raise anything; it is sent to the calling process
        is_syntax = any(parent.__name__ == "TemplateSyntaxError" for parent in type(error).__mro__)
        facts = {"raised": str(error)[:2000], "line": getattr(error, "lineno", 0), "is_syntax": is_syntax}
        return json.dumps({**facts, "seconds": time.process_time() - start}).encode()


def _limit_memory() -> None:
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: only the time is limited
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _exit_with_starter(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(0)
