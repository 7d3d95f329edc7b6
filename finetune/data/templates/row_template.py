"""Jinja templates over a row's columns, from the job YAML: sandboxed, strict, compiled once per process."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from traceback import walk_tb
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune.data.rows import Row
from finetune.errors import DataError

WHOLE_ROW = "row"
"""The variable with all columns of the row, for columns whose names are not identifiers: `row['my column']`."""

_FILE = "<row template>"

TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    RuntimeError,  # among them RecursionError
    SyntaxError,  # of the Python code to which Jinja compiles
    MemoryError,
)
"""The exceptions that an arbitrary template can raise, here and in a chat template."""

MAX_CHARACTERS = 1 << 26
"""The longest text that a template may write for one row."""


def require_length_limit(text: str, *, template: str) -> str:
    """Return the rendered text; raises DataError naming the template if it is too long to be tokenized."""
    if len(text) > MAX_CHARACTERS:
        raise DataError(
            f"the template ({template}) writes {len(text):,} characters for one row; the limit is {MAX_CHARACTERS:,}. "
            "Look for loops and products in it that grow with their input."
        )
    return text


def render_template(template: Any, row: Row, *, column: str) -> Any:
    """Return the rendered template of a column: a text, or a list of turns with rendered texts.

    Raises DataError naming the column and the line of its template.
    """
    if isinstance(template, str):
        try:
            text = _compiled(template).render({WHOLE_ROW: row, **row})
        except TEMPLATE_FAILURES as error:
            columns = ", ".join(f"`{name}`" for name in row)
            where, reason = f"template of `{column}`, line {_line(error)}", str(error).rstrip(".")
            raise DataError(f"{where}: {reason}. The row's columns are {columns}.") from error
        return require_length_limit(text, template=f"of `{column}`")
    if isinstance(template, Mapping):
        return {name: render_template(inner, row, column=column) for name, inner in template.items()}
    if isinstance(template, list | tuple):
        return [render_template(inner, row, column=column) for inner in template]
    return template


def check_row_template(template: Any, *, key: str) -> None:
    """Raise DataError naming the key and the line unless every text in it is valid Jinja."""
    for text in _texts(template):
        try:
            _compiled(text)
        except TemplateSyntaxError as error:
            raise DataError(f"{key}, line {error.lineno}: not valid Jinja: {error.message}") from error
        except TEMPLATE_FAILURES as error:
            raise DataError(f"{key}: cannot be compiled: {error}") from error


def columns_used(template: Any) -> frozenset[str]:
    """Return the names that the template reads: columns, or `row` for all of them."""
    return frozenset(
        name for text in _texts(template) for name in meta.find_undeclared_variables(_environment().parse(text))
    )


def _texts(template: Any) -> Iterator[str]:
    if isinstance(template, str):
        yield template
    elif isinstance(template, Mapping | list | tuple):
        for inner in template.values() if isinstance(template, Mapping) else template:
            yield from _texts(inner)


def _line(error: Exception) -> int:
    """Return the line of the template in which the error was raised, from its traceback."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
    return lines[-1] if lines else 1


@cache
def _compiled(text: str) -> Template:
    environment = _environment()
    code = environment.compile(text, filename=_FILE)
    return Template.from_code(environment, code, environment.make_globals(None))


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment without access outside the row and without randomness."""
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes `<` for HTML
    environment.filters["fromjson"] = json.loads
    environment.filters["transcript"] = transcript
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


_BEGINNINGS = ("", "<s>", "<bos>", "<|begin_of_text|>")
"""What may stand before the first turn of a transcript without being a system message."""


def transcript(text: str, user: str, assistant: str, system: str = "", tool: str = "", end: str = "") -> str:
    """Return the turns of a transcript as JSON text: a filter of row templates.

    Each turn follows the mark of its speaker; `end` is removed after answers. Text before the first mark is a system
    turn. An empty answer at the end, the place for the one to be generated, is left out.

    >>> transcript("Human: Hi! Assistant: Hello.", "Human:", "Assistant:")
    '[{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]'

    Raises ValueError for a text without the mark of the user.
    """
    marks = {user: "user", assistant: "assistant", system: "system", tool: "tool"}
    known = sorted(filter(None, marks), key=len, reverse=True)
    before, *pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)
    if user not in pieces[::2]:
        raise ValueError(f"a transcript without {user!r}, the mark of the user")
    turns = [{"role": marks[mark], "content": words} for mark, words in zip(pieces[::2], pieces[1::2], strict=True)]
    turns = turns if before.strip() in _BEGINNINGS else [{"role": "system", "content": before}, *turns]
    for turn in turns:
        turn["content"] = turn["content"].strip().removesuffix(end).strip()
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return json.dumps(turns, ensure_ascii=False)
