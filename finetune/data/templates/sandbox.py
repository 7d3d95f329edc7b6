"""Which templates are safe to render here; the others run in a process with limits on time and memory, without torch.

A request to that process is a pickle of (function, arguments), an answer is JSON: `{"made": ...}` or the exception,
with the `seconds` of CPU time. Both are preceded by their length.
"""

import json
import os
import pickle
import re
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from jinja2 import Environment, TemplateError, nodes
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.errors import DataError
from finetune.runtime.processes import exit_with_pipe, ignore_run_signals


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


TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    SyntaxError,  # of the Python code to which Jinja compiles
    MemoryError,
)
"""The exceptions that rendering an arbitrary template can raise."""


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
    if worker is None or worker.process.poll() is not None:
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
        module = "finetune.data.templates.sandbox"
        code = f"import sys; sys.path[:] = {path}; from {module} import main; main({child_end})"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(child_end,)
            )
        finally:
            os.close(child_end)
        try:
            self.call(pickle.dumps((bool, ())), seconds=_START_SECONDS)  # wait for its imports
        except (OSError, TimeoutError) as error:
            self.end()
            raise DataError(
                "the process that runs untrusted templates failed to start; its output is above. Set "
                "data.chat_template to a built-in one, or remove it."
            ) from error

    def call(self, request: bytes, *, seconds: float) -> bytes:
        """Return the answer; raises TimeoutError, or OSError if the process has exited."""
        assert self.process.stdin is not None and self.process.stdout is not None
        send(self.process.stdin, request)
        poll = select.poll()  # `select` does not support descriptors above 1,023
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError
        answer = receive(self.process.stdout)
        if answer is None:
            raise OSError("the process has exited")
        return answer

    def end(self) -> None:
        """Kill the process and wait for it."""
        _workers.pop(os.getpid(), None)
        with suppress(OSError):
            os.close(self._pipe)
        self.process.kill()
        self.process.communicate()


_MAX_CHARACTERS = 1 << 18
_MAX_LOOP_DEPTH = 4
_MAX_NUMBER = 10_000
_MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")

# fmt: off
_FILTERS = frozenset({
    "trim", "tojson", "fromjson", "length", "count", "string", "int", "float", "join", "items",
    "upper", "lower", "title", "capitalize", "first", "last", "default", "d", "list", "reverse",
    "sort", "selectattr", "rejectattr", "select", "reject", "map", "unique", "dictsort", "safe", "e",
    "escape", "abs", "round", "min", "max", "sum", "striptags", "groupby", "transcript",
})
_METHODS = frozenset({
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition",
    "startswith", "endswith", "removeprefix", "removesuffix", "items", "keys", "values", "get",
    "lower", "upper", "title", "capitalize", "find", "rfind", "index", "count", "isdigit", "isspace",
    "isalpha", "changed", "previtem", "nextitem", "cycle", "append", "pop",
})
# fmt: on
_FUNCTIONS = frozenset(("raise_exception", "namespace", "dict", "strftime_now"))
_GROWING = (nodes.Mul, nodes.Pow, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@lru_cache(maxsize=64)
def is_bounded(template: str, *, may_gather: bool = True) -> bool:
    """Return whether the template cannot amplify its input: it has no products, formats, ranges, or recursion.

    Returns False if that cannot be decided. With `may_gather`, a namespace may accumulate text over the turns of a
    conversation, as most chat templates do; repeated doubling is not detected then.
    """
    if len(template) > _MAX_CHARACTERS:
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_markers(template))
        has_unbounded_node = any(True for _ in _unbounded_nodes(tree, may_gather=may_gather))
        return not has_unbounded_node and _loop_depth(tree) <= _MAX_LOOP_DEPTH
    except (TemplateError, RecursionError, MemoryError):  # reported when it is compiled in the sandbox
        return False


def without_markers(template: str) -> str:
    """Return the template without `{% generation %}` and its end, which only transformers' Jinja extension supports."""
    return _MARKERS.sub("", template)


def _unbounded_nodes(tree: nodes.Template, *, may_gather: bool) -> Iterator[nodes.Node]:
    """Yield the nodes whose result may be much larger than the template's input."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    yield from tree.find_all(_GROWING)
    for node in tree.find_all(nodes.Mod):  # a format, unless it is an expression such as `loop.index0 % 2`
        is_of_loop = isinstance(node.left, nodes.Getattr) and getattr(node.left.node, "name", None) == "loop"
        if not is_of_loop or not isinstance(node.right, nodes.Const):
            yield node
    yield from (node for node in tree.find_all(nodes.Filter) if node.name not in _FILTERS)
    yield from (node for node in tree.find_all(nodes.For) if node.recursive)
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, int) and abs(constant.value) > _MAX_NUMBER:
            yield constant
    yield from (node for node in tree.find_all(nodes.Call) if not _is_bounded_call(node, macros))
    for macro in tree.find_all(nodes.Macro):
        yield from (name for name in macro.find_all(nodes.Name) if name.name in macros and name.ctx == "load")
    if not may_gather:
        yield from tree.find_all(nodes.NSRef)


def _loop_depth(node: nodes.Node) -> int:
    """Return the maximum depth of nested loops."""
    inner = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    return inner + isinstance(node, nodes.For)


def _is_bounded_call(call: nodes.Call, macros: set[str]) -> bool:
    function, arguments = call.node, call.args
    if isinstance(function, nodes.Name):
        if function.name == "strftime_now":  # a format may contain a width
            return all(isinstance(value, nodes.Const) and not re.search(r"\d", str(value.value)) for value in arguments)
        return function.name in _FUNCTIONS or function.name in macros
    if not isinstance(function, nodes.Getattr):
        return False
    if function.attr != "replace":
        return function.attr in _METHODS
    lengths = [len(str(value.value)) for value in arguments[:2] if isinstance(value, nodes.Const)]
    return len(lengths) == 2 and lengths[0] > 0 and lengths[1] <= lengths[0] + 1


MAX_BYTES = 512 << 20
"""The memory that templates may use in addition to the process's memory at its start."""

_MAX_ANSWER_BYTES = 1 << 28
_LENGTH = struct.Struct("<Q")


def main(pipe: int) -> None:
    """Answer requests on standard input until it is closed, or until the other end of the pipe is closed."""
    exit_with_pipe(pipe)
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
