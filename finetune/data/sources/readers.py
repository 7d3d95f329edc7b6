"""From an open file to rows: JSON lines, JSON, CSV, TSV, plain text, Parquet and Arrow."""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NoReturn

from finetune.data.rows import RawRow, parse_json, shortened
from finetune.data.sources.tables import arrow_rows, num_parquet_rows, parquet_rows
from finetune.errors import DataError

MOST_LINE_BYTES = 256 << 20
"""Of the longest line that is read as a row."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def rows_of(stream: BinaryIO, kind: str, *, origin: str, start: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a file of that kind without the first `start`.

    Raises DataError naming the place in the file, besides what reading the stream raises.
    """
    if kind in _TABLES:
        yield from _TABLES[kind](stream, origin, start)
    else:
        buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(_raw(stream), 1 << 20)
        yield from islice(_TEXTS[kind](buffered, origin), start, None)


def count_rows(stream: BinaryIO, kind: str, *, at_most: int) -> int:
    """Return how many rows the file has, or `at_most`."""
    if kind == ".parquet":
        return min(at_most, num_parquet_rows(stream))
    return sum(1 for _ in islice(rows_of(stream, kind, origin=""), at_most))


def _raw(stream: Any) -> io.RawIOBase:
    return stream  # type: ignore[no-any-return]  # what decompresses or downloads has `readinto`, all that is needed


def _json_lines(stream: io.BufferedReader, origin: str) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin):
        yield RawRow(origin, number, line)


def _plain_lines(stream: io.BufferedReader, origin: str) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin, keep_blanks_around=True):
        try:
            yield RawRow(origin, number, {"text": line.decode("utf-8")})
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}, line {number}: not UTF-8 text ({error.reason}).") from error


def _lines(stream: io.BufferedReader, origin: str, *, keep_blanks_around: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number."""
    for number, line in enumerate(iter(partial(stream.readline, MOST_LINE_BYTES + 1), b""), start=1):
        if len(line) > MOST_LINE_BYTES:
            raise DataError(f"{origin}, line {number}: has more than {MOST_LINE_BYTES >> 20} MB: this is not a row.")
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        stripped = content.strip()
        if stripped:
            yield number, content.rstrip(b"\r\n") if keep_blanks_around else stripped


def _json(stream: io.BufferedReader, origin: str) -> Iterator[RawRow]:
    """Yield the objects of one array; a file whose first line is a whole value is read as JSON lines."""
    if stream.peek(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        for number, value in enumerate(_parsed(stream.read(), origin), start=1):
            if not isinstance(value, dict):
                raise DataError(f"{origin}, row {number}: each element of the array must be an object with columns.")
            yield RawRow(origin, number, value)
        return
    for place, (number, line) in enumerate(_lines(stream, origin)):
        if place == 0 and not _is_whole(line):
            _refuse_one_object(_parsed(line + b"\n" + stream.read(), origin), origin)
        yield RawRow(origin, number, line)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except RecursionError:
        return True  # told where the row is read
    except ValueError as error:
        return not isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
    return True


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return parse_json(content.removeprefix(_BYTE_ORDER_MARK))
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 text ({error.reason}).") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{origin}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}. "
            "The file must be an array of objects, or one object on each line."
        ) from error


def _refuse_one_object(value: Any, origin: str) -> NoReturn:
    lists = [name for name, inner in value.items() if isinstance(inner, list)] if isinstance(value, dict) else []
    where = f"its rows seem to be in `{lists[0]}`: write that array" if lists else "write its rows"
    raise DataError(
        f"{origin}: is one object, not an array of objects; {where} to a file of its own "
        f"(for example with `jq -c '.{lists[0] if lists else 'NAME'}[]' FILE > rows.jsonl`)."
    )


def _csv(stream: io.BufferedReader, origin: str, *, delimiter: str = ",") -> Iterator[RawRow]:
    """Yield the rows below the header line; every value is text."""
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    reader = csv.DictReader(
        io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True
    )
    try:
        _refuse_equal_names(reader.fieldnames or (), origin)
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                width = len(reader.fieldnames or ())
                separator = "comma" if delimiter == "," else "tab"
                raise DataError(
                    f"{origin}, row {number} (line {reader.line_num}): does not have the {width} fields of the header. "
                    f"A {separator} inside a text needs quotes around it."
                )
            yield RawRow(origin, number, row)
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}, after line {reader.line_num}: not UTF-8 text ({error.reason}).") from error
    except csv.Error as error:
        raise DataError(f"{origin}, line {reader.line_num}: not valid CSV: {error}.") from error


def _refuse_equal_names(names: Sequence[str], origin: str) -> None:
    if len(set(names)) < len(names):
        twice = shortened(next(name for name, number in Counter(names).items() if number > 1))
        raise DataError(f"{origin}: the header has the column `{twice}` twice. Keep one of them.")


def _tsv(stream: io.BufferedReader, origin: str) -> Iterator[RawRow]:
    return _csv(stream, origin, delimiter="\t")


_TEXTS: Mapping[str, Callable[[io.BufferedReader, str], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".txt": _plain_lines,
}
_TABLES: Mapping[str, Callable[[BinaryIO, str, int], Iterator[RawRow]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
TEXT_KINDS, TABLE_KINDS = tuple(_TEXTS), tuple(_TABLES)
"""The endings that can be read; the texts also when they are compressed."""
