"""Tables and facts that fit the terminal; without a terminal, no line is cut."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from finetune.runtime.text.redact import redact_known_values
from finetune.runtime.text.rich_console import SafeConsole, styled_stream
from finetune.runtime.text.terminal import format_json, printable

_WIDTH_OF_A_FILE = 200


def width() -> int:
    """Return the width of the terminal; without one, a width at which no table line wraps."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_known else _WIDTH_OF_A_FILE


def number_table(*names: str) -> Table:
    """Return a table without lines whose columns are aligned on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print the table without trailing spaces."""
    console = SafeConsole(width=width())
    with console.capture() as capture:
        console.print(table)
    drawn = "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines()).strip("\n")
    print(drawn, file=styled_stream(sys.stdout))


def print_rows(head: Sequence[str], *rows: Sequence[str]) -> None:
    """Print a table of numbers whose rows are named in the first column."""
    table = number_table(*head)
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_json(value: Any, *, indent: int = 2, **settings: Any) -> None:
    """Print the plain value as JSON; secrets are redacted first, so that it stays valid JSON."""
    print(format_json(redact_known_values(value), indent=indent, **settings))


def print_facts(facts: Iterable[tuple[str, str]], *, indent: int = 16) -> None:
    """Print each name with its text, wrapped; words that are longer than a line are not split."""
    for name, text in facts:
        lines = textwrap.wrap(
            printable(text), max(width() - indent, 20), break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(f"{'' if number else name:<{indent}}{line}" for number, line in enumerate(lines or [""])))
