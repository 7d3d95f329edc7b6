"""Jinja texts over a row's columns, written in the job YAML: sandboxed, strict, compiled once per process."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from traceback import walk_tb
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune.data.rows import Row
from finetune.data.templates.sandbox import TemplateRefused, TemplateSyntax, run_sandboxed
from finetune.data.templates.static_check import is_bounded
from finetune.errors import DataError

WHOLE_ROW = "row"
"""The variable with all columns of the row, for columns whose name is not an identifier: `row['my column']`."""

_FILE = "<row template>"
_FAULTS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError),
    *(SyntaxError, MemoryError),  # of what Jinja compiles to
)


def render_template(written: Any, row: Row, *, column: str) -> Any:
    """Return what the template of a column makes of the row: a text, or for a list of turns that list with its texts.

    Raises DataError naming the column and the line of its template.
    """
    if isinstance(written, str):
        return _text(written, row, column=column)
    if isinstance(written, Mapping):
        return {name: render_template(inner, row, column=column) for name, inner in written.items()}
    if isinstance(written, list | tuple):
        return [render_template(inner, row, column=column) for inner in written]
    return written


def check_row_template(written: Any, *, key: str) -> None:
    """Raise DataError naming the key and the line unless every text in it is Jinja."""
    for text in _texts(written):
        try:
            if is_bounded(text, may_gather=False):
                compile_text(text)
            else:
                run_sandboxed(compile_text, text, name=f"of {key}", template=text)
        except (TemplateSyntaxError, TemplateSyntax) as error:
            reason = error.message if isinstance(error, TemplateSyntaxError) else str(error)
            raise DataError(f"{key}, line {error.lineno}: not valid Jinja: {reason}") from error
        except (*_FAULTS, TemplateRefused) as error:
            raise DataError(f"{key}: cannot be compiled: {error}") from error


def columns_used(written: Any) -> frozenset[str]:
    """Return the names that the template takes from outside: columns, or `row` for all of them."""
    return frozenset(name for text in _texts(written) for name in _names_in(text))


def undeclared_names(text: str) -> list[str]:
    """Return the names that the text takes from outside; Jinja computes what is constant to find them."""
    return sorted(meta.find_undeclared_variables(_environment().parse(text)))


def _names_in(text: str) -> list[str]:
    if is_bounded(text, may_gather=False):
        return undeclared_names(text)
    return list(run_sandboxed(undeclared_names, text, name="of a column", template=text))


def _texts(written: Any) -> Iterator[str]:
    if isinstance(written, str):
        yield written
    elif isinstance(written, Mapping | list | tuple):
        for inner in written.values() if isinstance(written, Mapping) else written:
            yield from _texts(inner)


def _text(written: str, row: Row, *, column: str) -> str:
    try:
        if is_bounded(written, may_gather=False):
            return render_text(written, row)
        return str(run_sandboxed(render_text, written, dict(row), name=f"of `{column}`", template=written))
    except (*_FAULTS, TemplateRefused) as error:
        line = error.lineno if isinstance(error, TemplateRefused) else _line(error)
        place = f"template of `{column}`, line {line}"
        columns = ", ".join(f"`{name}`" for name in row)
        raise DataError(f"{place}: {error}. The row's columns are {columns}.") from error


def render_text(written: str, row: Row) -> str:
    """Return what the template makes of the row; what it raises knows the line of the template as `lineno`."""
    try:
        return _compiled(written).render({WHOLE_ROW: row, **row})
    except _FAULTS as error:
        error.lineno = _line(error)  # type: ignore[union-attr]  # for who runs it in another process
        raise


def compile_text(written: str) -> None:
    """Compile the template, in which Jinja already computes what is constant; raises what Jinja raises."""
    _compiled(written)


def _line(error: Exception) -> int:
    """Return the line of the template in which it was raised; Jinja writes it into the traceback."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
    return lines[-1] if lines else 1


@cache
def _compiled(text: str) -> Template:
    environment = _environment()
    code = environment.compile(text, filename=_FILE)
    return Template.from_code(environment, code, environment.make_globals(None))


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja without what reaches out of the row, and without what draws lots: a row is always the same."""
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tojson"] = _to_json  # Jinja's own writes `<` as \u003c, for web pages
    environment.filters["fromjson"] = json.loads
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
