import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from finetune.runtime.text.terminal import (
    GuardedStream,
    escape_controls,
    format_json,
    format_traceback,
    guarded_output,
    printable,
)


class Terminal(io.StringIO):
    """A stream that reports being a terminal."""

    def isatty(self) -> bool:
        return True


def ascii_pipe() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]8;;http://evil\x07click\x1b]8;;\x07", "\\x1b]8;;http://evil\\x07click\\x1b]8;;\\x07"),
        ("\x9b31m \x90q\x9c", "\\x9b31m \\x90q\\x9c"),
        ("safe\rEVIL", "safe\\x0dEVIL"),
        ("ab\x08\x7f", "ab\\x08\\x7f"),
        ("a\u202egnp.exe", "a\\u202egnp.exe"),
        ("\u2066a\u2069\u061c\u200e", "\\u2066a\\u2069\\u061c\\u200e"),
        ("a\u200bb\ufeff\u2060", "a\\u200bb\\ufeff\\u2060"),
        ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
        ("hidden\U000e0041", "hidden\\U000e0041"),
        ("half \udc9b", "half \\udc9b"),
        ("pay\u200dpal", "pay\\u200dpal"),
    ],
)
def test_control_characters_are_printed_as_escapes(text, shown):
    assert escape_controls(text) == shown
    assert escape_controls(shown) == shown


@pytest.mark.parametrize(
    "text", ["tab\there\nnext", "ü ß 日本語 ﷺ", "👨\u200d👩\u200d👧 ✈\ufe0f", "\u0645\u06cc\u200c\u062e", "█ ⟦a⟧\u00a0"]
)
def test_printable_text_is_unchanged(text):
    assert escape_controls(text) == text


def test_windows_line_ends_are_normalized():
    assert escape_controls("a\r\nb\r\n") == "a\nb\n"


def test_secrets_are_redacted_before_control_characters_are_escaped():
    assert printable("https://me:wo\x1brd@h/x") == "https://[redacted]@h/x"


def test_json_keeps_its_value_and_has_no_control_characters():
    value = {"a\x9b": ["\u202e\x1b\x7f", "ü 👨\u200d👩", "\udc9b", "\U000e0041"]}
    text = format_json(value, indent=2)
    assert json.loads(text) == value
    assert escape_controls(text) == text
    assert "ü 👨\u200d👩" in text
    text.encode()


def test_an_escape_split_over_two_writes_is_escaped():
    screen = io.StringIO()
    stream = GuardedStream(screen)
    for piece in ("a\x1b", "[31", "mred\x1b[0m"):
        stream.write(piece)
    assert screen.getvalue() == "a\\x1b[31mred\\x1b[0m"


def test_a_stream_that_cannot_write_a_character_writes_its_escape():
    pipe = ascii_pipe()
    print("für \udcff ⟦x⟧", file=GuardedStream(pipe))
    assert pipe.buffer.getvalue() == b"f\\xfcr \\udcff \\u27e6x\\u27e7\n"  # type: ignore[attr-defined]


def test_bytes_cannot_bypass_a_guarded_stream():
    stream = GuardedStream(ascii_pipe())
    assert not hasattr(stream, "buffer")
    with pytest.raises(TypeError, match="only text can be written to a guarded stream, not bytes"):
        stream.write(b"raw")  # type: ignore[arg-type]
    assert stream.encoding == "ascii"


def test_a_library_s_progress_bar_still_moves_on_a_terminal_and_only_there():
    screen, file = Terminal(), io.StringIO()
    for stream in (screen, file):
        for text in ("\r 10%", "\x1b[A", "\rname \x1b[31m"):
            GuardedStream(stream, has_bars=True).write(text)
    assert screen.getvalue() == "\r 10%\x1b[A\rname \\x1b[31m"
    assert file.getvalue() == "\\x0d 10%\\x1b[A\\x0dname \\x1b[31m"


def test_a_wrapper_of_stream_write_gets_escaped_and_redacted_text():
    screen, heard = io.StringIO(), []
    stream = GuardedStream(screen)
    before = stream.write
    stream.write = lambda text: heard.append(text) or before(text)  # type: ignore[method-assign]
    print("\x1b[2J https://h/?token=c0ffee", file=stream)
    assert "".join(heard) == screen.getvalue() == "\\x1b[2J https://h/?token=[redacted]\n"


def test_carriage_returns_of_an_answer_do_not_overwrite_the_terminal():
    screen = Terminal()
    for piece in ("\r", "\x1b[A", "\rEVIL"):
        GuardedStream(screen).write(piece)
    assert screen.getvalue() == "\\x0d\\x1b[A\\x0dEVIL"


def test_streams_are_guarded_once_and_restored(capsys):
    before = sys.stdout, sys.stderr
    with guarded_output():
        inside = sys.stdout
        with guarded_output():
            assert sys.stdout is inside
        print("\x1b[2J")
        print("\x1b[2J", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("\\x1b[2J\n", "\\x1b[2J\n")


def test_an_error_in_a_thread_is_printed_without_secrets(capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's collects them

    def fail() -> None:
        raise ValueError("\x1b[2J https://h/?token=c0ffee")

    with guarded_output():
        thread = threading.Thread(target=fail, name="a\x1bb")
        thread.start()
        thread.join()
    said = capsys.readouterr().err
    assert said.startswith("Exception in thread a\\x1bb:\nTraceback"), said
    assert said.endswith("ValueError: \\x1b[2J https://h/?token=[redacted]\n")


def test_a_traceback_includes_its_causes():
    try:
        try:
            raise ValueError("https://h/?token=c0ffee")
        except ValueError as error:
            raise KeyError("\x1b[2J") from error
    except KeyError as error:
        text = format_traceback(error)
    assert "ValueError: https://h/?token=[redacted]" in text
    assert "direct cause" in text
    assert text.endswith("KeyError: '\\x1b[2J'")


ROOT = Path(__file__).parents[3]

STORY = """
import logging, os, warnings
import transformers
from finetune.runtime.text.terminal import quiet_libraries
quiet_libraries(is_main={is_main})
logging.getLogger("transformers.models").warning("a warning of a library")
warnings.warn("a warning of Python")
logging.getLogger("transformers.models").error("an error of a library")
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # as it does when it is imported
logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU. If you have GPU ...")
logging.getLogger("DeepSpeed").warning("a warning of DeepSpeed")
print("bars", transformers.utils.logging.is_progress_bar_enabled(), os.environ.get("HF_DATASETS_DISABLE_PROGRESS_BARS"))
"""


def said(*, is_main: bool) -> str:
    """Return the output of a process after quiet_libraries, in its own interpreter since logging is global."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", STORY.format(is_main=is_main)],
        capture_output=True, text=True, check=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_main_rank_keeps_warnings_and_has_no_bars_in_a_log_file():
    told = said(is_main=True)
    assert "a warning of a library" in told and "a warning of Python" in told and "bars False 1" in told
    assert "a warning of DeepSpeed" in told and "Setting accelerator" not in told


def test_other_ranks_keep_only_errors():
    told = said(is_main=False)
    assert "a warning" not in told and "an error of a library" in told and "bars False 1" in told
