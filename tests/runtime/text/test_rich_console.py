import contextlib
import io

import pytest
from rich.progress import BarColumn
from rich.table import Table
from rich.text import Text

from finetune.runtime.text.redact import register_secrets
from finetune.runtime.text.rich_console import SafeConsole, SafeProgress, SafeTextColumn
from finetune.runtime.text.terminal import guarded_output

register_secrets({"password": "c0ffee-of-the-job"})
EVIL = "\x1b]8;;http://evil\x9c[link=http://evil]x[/link]\u202e a c0ffee-of-the-job"
SHOWN = "\\x1b]8;;http://evil\\x9c[link=http://evil]x[/link]\\u202e a [redacted]"


class Terminal(io.StringIO):
    """A stream that reports being a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """Return a color terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def drawn(screen: Terminal) -> str:
    table = Table()
    table.add_column(EVIL)
    table.add_row(EVIL)
    with contextlib.redirect_stdout(screen), guarded_output():
        console = SafeConsole(width=120)
        for each in (EVIL, Text(EVIL, style="bold red"), table):
            console.print(each)
    return screen.getvalue()


def test_foreign_text_is_not_interpreted_as_markup_or_escapes_in_lines_and_tables(screen):
    said = drawn(screen)
    assert said.count(SHOWN) == 4
    assert "\x1b]8" not in said
    assert "c0ffee" not in said


def test_our_own_colors_are_shown(screen):
    assert f"\x1b[1;31m{SHOWN}\x1b[0m" in drawn(screen)


def test_control_sequences_printed_above_a_progress_bar_are_escaped(screen):
    columns = SafeTextColumn("{task.description}"), BarColumn()
    with contextlib.redirect_stdout(screen), guarded_output():
        with SafeProgress(*columns, console=SafeConsole(width=200)) as bars:
            bars.add_task(EVIL, total=1)
            print(EVIL)
        print(EVIL)
    said = screen.getvalue()
    assert said.count(SHOWN) >= 3
    assert "\x1b]8" not in said
    assert "c0ffee" not in said
