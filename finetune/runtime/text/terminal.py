"""Untrusted text on its way to a terminal, a pipe or a log: printable, and without effect on the terminal.

Whatever moves the cursor, colors, hides or reorders text is shown as the escape that Python writes for it. While a
command runs, standard output and error are guarded: everything printed there, by libraries too, goes through
`printable`, and what libraries log is limited to one process per run. Imports no torch.
"""

import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO

from finetune.errors import UserError
from finetune.runtime.text.redact import collect_environment_secrets, redact_known

_CONTROL_CHARACTERS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line end, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"  # nothing to see, or marks of direction
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"  # line ends, overrides and isolates of direction
    "\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # half characters, tags
)
_CONTROLS = re.compile(f"[{_CONTROL_CHARACTERS}]|(?<![\u0300-\U0010ffff])[\u200c\u200d]")
"""Joiners belong to scripts and emoji; after any other character they are only hidden."""

_ASCII_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f]")

_BAR = re.compile(r"\r|(?:\x1b\[A)+")
"""Cursor movements of libraries' progress bars on a terminal's standard error, alone or before their text."""


def escape_controls(text: str) -> str:
    r"""Return the text with control characters replaced by their escapes; tabs and line ends are kept.

    >>> escape_controls("a\x1b[31mred\r\n\u202e")
    'a\\x1b[31mred\n\\u202e'
    """
    text = text.replace("\r\n", "\n") if "\r" in text else text
    return (_ASCII_CONTROLS if text.isascii() else _CONTROLS).sub(_escape, text)


def printable(text: str) -> str:
    """Return the text for printing: without secrets and control characters."""
    return escape_controls(redact_known(text))


def format_json(value: Any, *, indent: int | None = None, **settings: Any) -> str:
    """Return the value as JSON with readable text in every script, and without effect on a terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, **settings)
    if text.isascii() and "\x7f" not in text:
        return text
    return _CONTROLS.sub(lambda match: match[0] if match[0] in "\r\n\t" else json.dumps(match[0])[1:-1], text)


class GuardedStream:
    """A text stream that escapes characters its encoding does not have; otherwise like the wrapped stream.

    It has no `buffer`, which would bypass it. With `has_bars`, cursor movements of libraries' progress bars pass on a
    terminal. `keeps_escapes` keeps escapes, for text that was made printable before it was colored.
    """

    def __init__(self, stream: TextIO, *, keeps_escapes: bool = False, has_bars: bool = False) -> None:
        self.stream = stream
        self._keeps_escapes = keeps_escapes
        self._has_bars = has_bars and not getattr(stream, "closed", False) and stream.isatty()
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            with suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write the text, readable."""
        readable = self._readable(text)
        try:
            self.stream.write(readable)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(readable.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "stream"):  # `stream` is looked up here only before it is set
            raise AttributeError(f"a guarded stream has no `{name}`: only text can be written")
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "write":  # wandb replaces it by a wrapper, which also gets only readable text
            super().__setattr__(name, lambda text: value(self._readable(text)))
        else:
            super().__setattr__(name, value)

    def _readable(self, text: str) -> str:
        if not isinstance(text, str):
            raise TypeError(f"only text can be written to a guarded stream, not {type(text).__name__}")
        if self._keeps_escapes:
            return redact_known(text)
        bar = _BAR.match(text) if self._has_bars else None
        if bar is None:
            return printable(text)
        return bar[0] + printable(text[bar.end() :])


def write_file_to_stdout(text: str) -> None:
    """Write a generated file to standard output, byte for byte, for another program.

    The caller guarantees that it has neither secrets nor control characters.
    """
    stream = sys.stdout.stream if isinstance(sys.stdout, GuardedStream) else sys.stdout
    if stream is None:
        raise UserError("standard output is closed: the file cannot be written to it.")
    stream.flush()
    if hasattr(stream, "buffer"):
        stream.buffer.write(text.encode())
    else:
        stream.write(text)
    stream.flush()


@contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output and error in this context; nested calls do nothing."""
    if isinstance(sys.stdout, GuardedStream):
        yield
        return
    before = sys.stdout, sys.stderr
    guard_process()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard_process() -> None:
    """Guard standard output and error of this process until it ends, which reports of errors in threads use, too."""
    collect_environment_secrets()
    guard_streams()


def guard_streams() -> None:
    """Guard the current standard output and error, which a progress bar may have replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream, has_bars=name == "stderr"))


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an unexpected error and of its causes, printable."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(format_traceback(error), file=sys.stderr, flush=True)


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an unexpected error and of its causes, printable."""
    return printable("".join(traceback.format_exception(error)).rstrip())


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


QUIETED_LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "DeepSpeed",
    "huggingface_hub",
    "peft",
    "torch",
    "transformers",
)

HARMLESS_WARNINGS = {
    "DeepSpeed": "Setting accelerator to CPU",  # in every run without a GPU
    "transformers.modeling_utils": "LOAD REPORT",  # of a head that a checkpoint or training fills, in escapes of colors
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than",  # cut to `data.max_length`
}
"""By logger, a part of messages that alarm falsely: their subject is checked or handled here."""

DEPRECATION_WARNINGS = (
    r"`is_gradient_checkpointing` is deprecated",  # peft 0.21 of transformers 5.23
    r"`torch\.distributed\.\w+` is deprecated",  # DeepSpeed 0.19 of torch 2.13, in every step
)
"""Patterns of warnings that one library causes in another, and that users cannot fix."""


def _lacks(part: str, record: logging.LogRecord) -> bool:
    return part not in record.getMessage()


def quiet_libraries(*, is_main: bool) -> None:
    """Keep the libraries' warnings on the main rank and only errors on the others; progress bars only at a terminal."""
    level = logging.WARNING if is_main else logging.ERROR
    for library in QUIETED_LIBRARIES:
        logging.getLogger(library).setLevel(level)
    for message in DEPRECATION_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    # DeepSpeed resets its level when it is imported, but keeps filters
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= level)
    for library, part in HARMLESS_WARNINGS.items():
        logging.getLogger(library).addFilter(partial(_lacks, part))
    if not is_main:
        warnings.simplefilter("ignore")
        for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):  # read when they are imported
            os.environ.setdefault(name, "error")
    if not is_main or not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
        switches = {
            "transformers.utils.logging": "disable_progress_bar",
            "datasets.utils.tqdm": "disable_progress_bars",
            "huggingface_hub.utils.tqdm": "disable_progress_bars",
        }
        for module, switch in switches.items():
            if module in sys.modules:
                getattr(sys.modules[module], switch)()
