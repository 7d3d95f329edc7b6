"""Jinja templates over a row's columns, from the job YAML: sandboxed, strict, compiled once per process."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from traceback import walk_tb
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune.data.rows import Row
from finetune.data.templates.sandbox import (
    TEMPLATE_FAILURES,
    TemplateRefused,
    TemplateSyntax,
    is_bounded,
    run_sandboxed,
)
from finetune.errors import DataError

WHOLE_ROW = "row"
"""The variable with all columns of the row, for columns whose names are not identifiers: `row['my column']`."""

_FILE = "<row template>"


def render_template(written: Any, row: Row, *, column: str) -> Any:
    """Return the rendered template of a column: a text, or a list of turns with rendered texts.

    Raises DataError naming the column and the line of its template.
    """
    if isinstance(written, str):
        try:
            if is_bounded(written, may_gather=False):
                return render_text(written, row)
            return str(run_sandboxed(render_text, written, dict(row), name=f"of `{column}`", template=written))
        except (*TEMPLATE_FAILURES, TemplateRefused) as error:
            line = error.lineno if isinstance(error, TemplateRefused) else _line(error)
            columns = ", ".join(f"`{name}`" for name in row)
            message = f"template of `{column}`, line {line}: {error}. The row's columns are {columns}."
            raise DataError(message) from error
    if isinstance(written, Mapping):
        return {name: render_template(inner, row, column=column) for name, inner in written.items()}
    if isinstance(written, list | tuple):
        return [render_template(inner, row, column=column) for inner in written]
    return written


def check_row_template(written: Any, *, key: str) -> None:
    """Raise DataError naming the key and the line unless every text in it is valid Jinja."""
    for text in _texts(written):
        try:
            if is_bounded(text, may_gather=False):
                compile_text(text)
            else:
                run_sandboxed(compile_text, text, name=f"of {key}", template=text)
        except (TemplateSyntaxError, TemplateSyntax) as error:
            reason = error.message if isinstance(error, TemplateSyntaxError) else str(error)
            raise DataError(f"{key}, line {error.lineno}: not valid Jinja: {reason}") from error
        except (*TEMPLATE_FAILURES, TemplateRefused) as error:
            raise DataError(f"{key}: cannot be compiled: {error}") from error


def columns_used(written: Any) -> frozenset[str]:
    """Return the names that the template reads: columns, or `row` for all of them."""
    names: set[str] = set()
    for text in _texts(written):
        if is_bounded(text, may_gather=False):
            names.update(undeclared_names(text))
        else:
            names.update(run_sandboxed(undeclared_names, text, name="of a column", template=text))
    return frozenset(names)


def undeclared_names(text: str) -> list[str]:
    """Return the names that the text reads; Jinja folds constants to find them."""
    return sorted(meta.find_undeclared_variables(_environment().parse(text)))


def _texts(written: Any) -> Iterator[str]:
    if isinstance(written, str):
        yield written
    elif isinstance(written, Mapping | list | tuple):
        for inner in written.values() if isinstance(written, Mapping) else written:
            yield from _texts(inner)


def render_text(written: str, row: Row) -> str:
    """Return the rendered template; exceptions have the line of the template as `lineno`."""
    try:
        return _compiled(written).render({WHOLE_ROW: row, **row})
    except TEMPLATE_FAILURES as error:
        error.lineno = _line(error)  # type: ignore[union-attr]  # the sandbox sends it to its caller
        raise


def compile_text(written: str) -> None:
    """Compile the template, which folds constants; exceptions from Jinja propagate."""
    _compiled(written)


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
