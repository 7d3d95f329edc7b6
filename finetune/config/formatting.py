"""Formats values and choices for messages."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from finetune.config.section import Section
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import escape_controls, format_json

MAX_SHOWN_CHARACTERS = 60
"""Maximum number of characters of a value in a message."""

_MAX_NAME_CHARACTERS = 200
"""Maximum number of characters of a name for which a similar name is suggested."""


def format_value(value: Any) -> str:
    """Return the value as it would be written in YAML, truncated if it is long.

    >>> format_value("4"), format_value(True), format_value(2e-5)
    ('`"4"`', '`true`', '`2e-05`')
    """
    return f"`{truncate(format_json(redacted_config(value), default=str))}`"


def truncate(text: str, *, most: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the text, truncated if it is long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def escape_variables(text: str) -> str:
    """Return YAML whose text is read as it is, also with `${` in it."""
    return text.replace("${", "$${")


def job_yaml(section: Section) -> str:
    """Return the text of a job file with the keys that were written, and no others.

    Read as a job, it gives the same config: values are JSON on one line, which is YAML 1.2.
    """
    return "\n".join(_written_lines(section, indent="")) + "\n"


def _written_lines(section: Section, *, indent: str) -> Iterator[str]:
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            inner = list(_written_lines(value, indent=f"{indent}  "))
            yield f"{indent}{name}:{'' if inner else ' {}'}"
            yield from inner
        else:
            # of sections in a list, too, only the keys that were written
            text = json.dumps(value, default=lambda each: each.model_dump(exclude_unset=True), ensure_ascii=False)
            yield f"{indent}{name}: {escape_controls(escape_variables(text))}"


def type_name(value: Any) -> str:
    """Return the type of the value, named as on the reference page."""
    names: Sequence[tuple[type, str]] = (
        (bool, "a truth value"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "a section"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def format_list(names: Iterable[str], *, last: str = "and") -> str:
    """Return the names in backticks, as a list in a sentence.

    >>> format_list(["a", "b", "c"], last="or")
    '`a`, `b` or `c`'
    """
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}" if quoted else "nothing"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `Did you mean ...?` with the closest known name, or an empty text if no name is close."""
    near = closest(name, choices)
    return f"Did you mean `{near}`?" if near else ""


def closest(name: str, choices: Iterable[str], *, cutoff: float = 0.65) -> str | None:
    """Return the closest known name, ignoring case; None if no name is close."""
    if len(name) > _MAX_NAME_CHARACTERS:
        return None
    by_lower = {name.lower(): name for name in choices}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def closest_multiples(number: int, divisor: int) -> str:
    """Return the multiples of the divisor just below and above the number.

    >>> closest_multiples(30, 16), closest_multiples(3, 16)
    ('16, 32', '16')
    """
    below = number // divisor * divisor
    return ", ".join(str(multiple) for multiple in (below, below + divisor) if multiple > 0)
