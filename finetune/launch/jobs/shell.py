"""Shell text from words, which are quoted unless the shell is meant to expand them."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ShellText:
    """A word that the shell expands, such as `"$RANK"`, with its quotes."""

    text: str


Word = str | ShellText


def quoted(word: Word) -> str:
    """Return the word, quoted for the shell.

    >>> quoted("a b"), quoted(ShellText('"$RANK"'))
    ("'a b'", '"$RANK"')
    """
    if isinstance(word, ShellText):
        return word.text
    text = shlex.quote(word)
    return f"'{text}'" if text.startswith("=") else text  # `NAME==` looks like a comparison


def command_line(words: Iterable[Word]) -> str:
    """Return the command as one line of a shell script, or several where a word has several."""
    return " ".join(map(quoted, words))


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return the lines that export the variables."""
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]


def render(template: str, **values: Any) -> str:
    """Return the script of a template; `quoted` and `command_line` are filters in it."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell text; the filters quote user input
    )
    environment.filters |= {"quoted": quoted, "command_line": command_line}
    return environment.get_template(template).render(**values)
