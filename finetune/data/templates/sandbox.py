"""Untrusted templates run in a process of their own with limits of time and memory. Imports no torch."""

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
    """Tell that all is imported."""
    return True


def render_chat(arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and from where to where its generation markers reach, of what transformers' function takes."""
    texts, marked = render_jinja_template(**arguments)
    return texts[0], [(start, end) for start, end in marked[0]] if marked else []


MAX_SECONDS = 3.0
"""Time that one row's template may take."""

_START_SECONDS = 120.0


class TemplateRefused(DataError):
    """What a template raised, in its own words."""

    def __init__(self, reason: str, *, line: int = 1) -> None:
        super().__init__(reason)
        self.lineno = line  # of the template, where it is known


class TemplateSyntax(TemplateRefused):
    """The template is not Jinja."""


def run_sandboxed(run: Callable[..., Any], *arguments: Any, name: str, template: str) -> Any:
    """Return what the function, which a module has at its top, makes of the arguments, as JSON can hold it.

    Raises TemplateRefused with its words where it raises, DataError naming the template where it takes too long or too
    much memory; one that did is not run again. The process is started at the first call of this one and kept.
    """
    with _lock:
        if template in _exceeded:
            raise DataError(_exceeded[template])
        try:
            answer = _request(pickle.dumps((run, arguments)), name)
        except DataError as error:
            _exceeded[template] = str(error)
            raise
    if "made" in answer:
        return answer["made"]
    if answer.get("memory"):
        _exceeded[template] = _too_much(name, f"more than {MAX_BYTES >> 20} MB of memory")
        raise DataError(_exceeded[template])
    kind = TemplateSyntax if answer.get("is_syntax") else TemplateRefused
    raise kind(str(answer.get("raised")), line=int(answer.get("line") or 1))


_lock = threading.Lock()
_exceeded: dict[str, str] = {}
"""From templates that took too much to what is said of them."""

_workers: "dict[int, _Worker]" = {}
"""This process's own worker; a forked child does not use its parent's."""


def _request(request: bytes, name: str) -> dict[str, Any]:
    worker = _workers.get(os.getpid())
    if worker is None or not worker.is_alive():
        worker = _workers[os.getpid()] = _Worker()
    try:
        content = worker.call(request, seconds=MAX_SECONDS)
        answer = json.loads(content)
    except TimeoutError as error:
        worker.end()
        raise DataError(_too_much(name, f"longer than {MAX_SECONDS:.0f} s")) from error
    except (OSError, ValueError, TypeError) as error:
        worker.end()
        raise DataError(_too_much(name, "more than its process could take, which has exited")) from error
    return dict(answer)


def _too_much(name: str, what: str) -> str:
    return f"the template ({name}) took {what}. Look for loops and products in it that grow with their input."


class _Worker:
    """The process, and the pipes that lead to it."""

    def __init__(self) -> None:
        life, self._held = os.pipe()
        path = json.dumps(sys.path)
        code = (
            f"import sys; sys.path[:] = {path}; from finetune.data.templates.sandbox_worker import main; main({life})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(life,)
            )
        finally:
            os.close(life)
        self._warm_up()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: bytes, *, seconds: float) -> bytes:
        """Return the answer; raises TimeoutError, OSError where the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        send(self._process.stdin, request)
        waiting = select.poll()  # `select` takes no descriptor above 1,023
        waiting.register(self._process.stdout, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            raise TimeoutError
        answer = receive(self._process.stdout)
        if answer is None:
            raise OSError("the process has ended")
        return answer

    def end(self) -> None:
        """Kill the process and wait for its end."""
        _workers.pop(os.getpid(), None)
        with suppress(OSError):
            os.close(self._held)
        self._process.kill()
        self._process.communicate()

    def _warm_up(self) -> None:
        try:
            self.call(pickle.dumps((is_ready, ())), seconds=_START_SECONDS)
        except (OSError, TimeoutError) as error:
            self.end()
            raise DataError(
                "the process that runs untrusted templates cannot be started: see its output above. Set "
                "data.chat_template to a built-in one, or remove it."
            ) from error
