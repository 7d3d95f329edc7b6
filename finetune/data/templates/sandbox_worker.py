"""The process that runs templates for another one: little memory, no torch, and its end when the other one ends.

A request is a pickle of (function, arguments), an answer JSON: `{"made": ...}` or what was raised. Both have their
length before them.
"""

import json
import os
import pickle
import resource
import struct
import sys
import threading
from pathlib import Path
from typing import IO, Any

from finetune.runtime.processes import ignore_run_signals

MAX_BYTES = 512 << 20
"""Memory that templates may use in addition to what the process has at its start."""

_LONGEST_ANSWER = 1 << 28
_LENGTH = struct.Struct("<Q")


def main(life: int) -> None:
    """Answer requests on standard input until it ends, or until the other end of the pipe `life` is closed."""
    threading.Thread(target=_end_with_starter, args=(life,), daemon=True).start()
    ignore_run_signals()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a template that prints does not answer
    is_limited = False
    while (content := receive(requests)) is not None:
        run, arguments = pickle.loads(content)
        if not is_limited:
            _limit_memory()
            is_limited = True
        send(answers, _answer(run, arguments))


def send(stream: IO[bytes], content: bytes) -> None:
    """Write the content with its length before it."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read what was sent; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    content = stream.read(size)
    return content if len(content) == size else None


def _answer(run: Any, arguments: tuple[Any, ...]) -> bytes:
    try:
        made = json.dumps({"made": run(*arguments)}).encode()
        return made if len(made) <= _LONGEST_ANSWER else json.dumps({"memory": True}).encode()
    except MemoryError:
        return json.dumps({"memory": True}).encode()
    except Exception as error:  # whatever a template raises is sent to the other process
        reason, is_syntax = (
            str(error)[:2000],
            any(kind.__name__ == "TemplateSyntaxError" for kind in type(error).__mro__),
        )
        return json.dumps({"raised": reason, "line": getattr(error, "lineno", 0), "is_syntax": is_syntax}).encode()


def _limit_memory() -> None:
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: time alone is limited
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _end_with_starter(life: int) -> None:
    os.read(life, 1)
    os._exit(0)
