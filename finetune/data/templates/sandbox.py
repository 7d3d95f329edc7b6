"""Runs untrusted templates in a separate process with limits on time and memory. Does not import torch."""

import json
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.templates.sandbox_worker import MAX_BYTES, receive, send
from finetune.errors import DataError


def is_ready() -> bool:
    """Return True; called to wait for the imports of the worker."""
    return True


def render_chat(arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation and the spans of its generation markers; the arguments are transformers'."""
    texts, marked = render_jinja_template(**arguments)
    return texts[0], [(start, end) for start, end in marked[0]] if marked else []


MAX_SECONDS = 3.0
"""The time limit for rendering one row."""

MAX_MEAN_SECONDS = 1.0
"""The CPU time that a template may take per row on average, which does not depend on the machine's load."""

_MIN_ROWS = 3
"""The number of rows after which the average counts: one long conversation is no reason to refuse a template."""

_START_SECONDS = 120.0


class TemplateRefused(DataError):
    """An exception raised by a template, with its message."""

    def __init__(self, reason: str, *, line: int = 1) -> None:
        super().__init__(reason)
        self.lineno = line  # of the template, 1 if unknown


class TemplateSyntax(TemplateRefused):
    """The template is not valid Jinja."""


def run_sandboxed(run: Callable[..., Any], *arguments: Any, name: str, template: str) -> Any:
    """Return the result, converted to JSON, of calling the module-level function in the sandbox.

    Raises TemplateRefused with the message of an exception, and DataError naming the template if it exceeds the limits
    on time or memory, for one row or on average, after which it is not run again. The worker is started by this
    process's first call and kept.
    """
    with _lock:
        if template in _exceeded:
            raise DataError(_exceeded[template])
        try:
            answer = _request(pickle.dumps((run, arguments)), name)
        except DataError as error:
            _exceeded[template] = str(error)
            raise
        rows, seconds = _usage.get(template, (0, 0.0))
        _usage[template] = rows, seconds = rows + 1, seconds + float(answer.get("seconds", 0.0))
        if rows >= _MIN_ROWS and seconds > MAX_MEAN_SECONDS * rows:
            _exceeded[template] = _limit_message(name, f"{seconds:.0f} s of CPU time for {rows} rows")
            raise DataError(_exceeded[template])
    if "made" in answer:
        return answer["made"]
    if answer.get("memory"):
        _exceeded[template] = _limit_message(name, f"more than {MAX_BYTES >> 20} MB of memory")
        raise DataError(_exceeded[template])
    error_class = TemplateSyntax if answer.get("is_syntax") else TemplateRefused
    raise error_class(str(answer.get("raised")), line=int(answer.get("line") or 1))


_lock = threading.Lock()
_exceeded: dict[str, str] = {}
"""Error messages by template, for templates that exceeded a limit."""

_usage: dict[str, tuple[int, float]] = {}
"""The number of rows rendered and their CPU time in seconds, by template."""

_workers: "dict[int, _Worker]" = {}
"""The worker of this process, by process id, so that a forked child does not use its parent's."""


def _request(request: bytes, name: str) -> dict[str, Any]:
    worker = _workers.get(os.getpid())
    if worker is None or not worker.is_alive():
        worker = _workers[os.getpid()] = _Worker()
    try:
        content = worker.call(request, seconds=MAX_SECONDS)
        answer = json.loads(content)
    except TimeoutError as error:
        worker.end()
        raise DataError(_limit_message(name, f"more than {MAX_SECONDS:.0f} s")) from error
    except (OSError, ValueError, TypeError) as error:
        worker.end()
        raise DataError(_limit_message(name, "too many resources, and its process exited")) from error
    return dict(answer)


def _limit_message(name: str, usage: str) -> str:
    return f"the template ({name}) took {usage}. Look for loops and products in it that grow with their input."


class _Worker:
    """The sandbox process and its pipes."""

    def __init__(self) -> None:
        child_end, self._pipe = os.pipe()
        path = json.dumps(sys.path)
        module = "finetune.data.templates.sandbox_worker"
        code = f"import sys; sys.path[:] = {path}; from {module} import main; main({child_end})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(child_end,)
            )
        finally:
            os.close(child_end)
        self._warm_up()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: bytes, *, seconds: float) -> bytes:
        """Return the answer; raises TimeoutError, or OSError if the process has exited."""
        assert self._process.stdin is not None and self._process.stdout is not None
        send(self._process.stdin, request)
        poll = select.poll()  # `select` does not support descriptors above 1,023
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError
        answer = receive(self._process.stdout)
        if answer is None:
            raise OSError("the process has exited")
        return answer

    def end(self) -> None:
        """Kill the process and wait for it."""
        _workers.pop(os.getpid(), None)
        with suppress(OSError):
            os.close(self._pipe)
        self._process.kill()
        self._process.communicate()

    def _warm_up(self) -> None:
        try:
            self.call(pickle.dumps((is_ready, ())), seconds=_START_SECONDS)
        except (OSError, TimeoutError) as error:
            self.end()
            raise DataError(
                "the process that runs untrusted templates failed to start; its output is above. Set "
                "data.chat_template to a built-in one, or remove it."
            ) from error
