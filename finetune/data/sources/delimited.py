"""Rows of CSV and TSV files, with a header or with columns by position; every value is text."""

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from finetune.data.rows import RawRow, shortened
from finetune.data.sources.decoding import decode_line
from finetune.data.sources.options import ReadOptions
from finetune.data.sources.unpacking import MAX_ROW_BYTES
from finetune.errors import DataError

_BYTE_ORDER_MARK = "\ufeff"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_NAMES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "pipe"}


class _Lines:
    """The file's lines as texts, and where the row began that is being read."""

    def __init__(self, stream: io.BufferedReader, origin: str) -> None:
        self._stream, self._origin = stream, origin
        self._num_bytes = 0  # of the row
        self.number = 0  # lines that have been handed out
        self.first = 1  # line of the row

    def begin_row(self) -> None:
        """Count the row's lines and bytes from here."""
        self.first, self._num_bytes = self.number + 1, 0

    def __iter__(self) -> Iterator[str]:
        for line in iter(partial(self._stream.readline, MAX_ROW_BYTES + 1), b""):
            self._num_bytes += len(line)
            if self._num_bytes > MAX_ROW_BYTES:
                raise DataError(
                    f"{self._origin}, line {self.first}: the row has more than {MAX_ROW_BYTES >> 20} MB: a quotation "
                    "mark in it is never closed, or this is not a CSV file. `quotes: false` takes them as they are."
                )
            text = decode_line(line, origin=self._origin, number=self.number + 1)
            if self.number == 0:
                text = text.removeprefix(_BYTE_ORDER_MARK)
            for each in _LINE.findall(text) if "\r" in text else (text,):
                self.number += 1
                yield each


def delimited_rows(stream: io.BufferedReader, origin: str, options: ReadOptions, *, delimiter: str) -> Iterator[RawRow]:
    """Yield the rows of a CSV file: those below the header line, or all, where columns have positions.

    Raises DataError with the line of a row that has more or fewer fields, and of damaged quotes or bytes.
    """
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    delimiter = options.delimiter or delimiter
    lines = _Lines(stream, origin)
    names: Sequence[str] | None = None
    number = 0
    for fields in _parsed(lines, origin, delimiter=delimiter, quotes=options.quotes):
        if names is None:
            names = _header(fields, origin) if options.has_header else _positions(fields, options)
            if options.has_header:
                continue
        number += 1
        if len(fields) == len(names) + 1 and not fields[-1]:
            fields.pop()  # a delimiter at the end of the line
        place = f"row {number} (line {lines.number})"
        if len(fields) != len(names):
            raise DataError(f"{origin}, {place}: {_ragged(fields, names, options, delimiter=delimiter)}")
        yield RawRow(origin, number, dict(zip(names, fields, strict=True)))


def _parsed(lines: _Lines, origin: str, *, delimiter: str, quotes: bool | None) -> Iterator[list[str]]:
    """Yield the fields of each row that is not a blank line."""
    quoting: Literal[0, 3] = csv.QUOTE_NONE if quotes is False else csv.QUOTE_MINIMAL
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True, quoting=quoting)
    while True:
        lines.begin_row()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{origin}, line {lines.first}: {_damage(error, lines)}") from error
        if fields is None:
            return
        if lines.number > lines.first and delimiter == "\t" and quotes is None:
            _refuse_rows_in_quotes(fields, lines, origin)
        if fields:
            yield fields


def _damage(error: csv.Error, lines: _Lines) -> str:
    if "unexpected end of data" in str(error):
        return (
            f"not valid CSV: a quotation mark in the row that begins here is not closed until the end of the file "
            f"(line {lines.number}). Close it, or write `quotes: false` if quotation marks are ordinary characters."
        )
    advice = "A quotation mark inside of quotes is written twice; `quotes: false` takes them as they are."
    return f"not valid CSV: {error}. {advice}"


def _refuse_rows_in_quotes(fields: Sequence[str], lines: _Lines, origin: str) -> None:
    """Raise DataError where tabs and line breaks stand inside of quotes, as if several rows had become one."""
    if any("\t" in each and ("\n" in each or "\r" in each) for each in fields):
        raise DataError(
            f"{origin}, lines {lines.first} to {lines.number}: are one row, since a quotation mark at the beginning of "
            "a field is closed several lines later, with tabs in between. Write `quotes: false` beside the path if "
            "quotation marks are ordinary characters, `quotes: true` if this is one row."
        )


def _header(fields: list[str], origin: str) -> list[str]:
    """Return the names of the columns; a further one without a name is called by its position."""
    blank = fields.index("") if "" in fields else 0
    names = [name or ("" if place == blank else str(place)) for place, name in enumerate(fields)]
    if len(set(names)) < len(names):
        twice = shortened(next(name for name, number in Counter(names).items() if number > 1))
        raise DataError(f"{origin}: the header has the column `{twice}` twice. Keep one of them.")
    return names


def _positions(fields: list[str], options: ReadOptions) -> list[str]:
    return [options.column_name(position) for position in range(len(fields))]


def _ragged(fields: Sequence[str], names: Sequence[str], options: ReadOptions, *, delimiter: str) -> str:
    of = "the header" if options.has_header else "the first row"
    return (
        f"does not have the {len(names)} fields of {of}, but {len(fields)}. "
        f"A {_NAMES.get(delimiter, f'`{delimiter}`')} inside a text needs quotes around it."
    )
