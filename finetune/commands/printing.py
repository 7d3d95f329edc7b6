"""Tables and facts fitted to a terminal; without a terminal, no line is cut."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.rich_console import SafeConsole, styled_stream
from finetune.runtime.text.terminal import format_json, printable

_WIDTH_OF_A_FILE = 200


def width() -> int:
    """Return the columns of the terminal; without one, enough that no line of a table is folded."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_known else _WIDTH_OF_A_FILE


def print_table(table: Table) -> None:
    """Print the table without the blanks that would make all its lines equally long."""
    console = SafeConsole(width=width())
    with console.capture() as capture:
        console.print(table)
    drawn = "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines()).strip("\n")
    print(drawn, file=styled_stream(sys.stdout))


def print_json(value: Any, *, indent: int = 2, **settings: Any) -> None:
    """Print the plain value as JSON; its secrets are left out before, so that it stays JSON."""
    print(format_json(redacted_config(value), indent=indent, **settings))


def print_facts(facts: Iterable[tuple[str, str]], *, indent: int = 16) -> None:
    """Print each name with what there is to say of it; words that are longer than a line stay whole."""
    for name, text in facts:
        lines = textwrap.wrap(
            printable(text), max(width() - indent, 20), break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(f"{'' if number else name:<{indent}}{line}" for number, line in enumerate(lines or [""])))
