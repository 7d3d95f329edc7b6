"""From an open file to rows: JSON lines, JSON, CSV, TSV, plain text, CoNLL, Parquet and Arrow."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NoReturn

from finetune.config.section import CONLL_KINDS
from finetune.data.rows import RawRow, not_utf8, parse_json, record_places
from finetune.data.sources.conll import conll_rows
from finetune.data.sources.decoding import as_utf8, decode_line
from finetune.data.sources.delimited import delimited_rows
from finetune.data.sources.options import DEFAULT_OPTIONS, ReadOptions
from finetune.data.sources.tables import arrow_rows, num_parquet_rows, parquet_rows
from finetune.data.sources.unpacking import MAX_ROW_BYTES
from finetune.errors import DataError

MAX_JSON_BYTES = 2 << 30
"""Of a JSON file that is one array or object, which is held in memory; JSON lines have no limit."""

_MAX_BLANK_LINES = 1_000_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def rows_of(
    stream: BinaryIO, kind: str, *, origin: str, options: ReadOptions = DEFAULT_OPTIONS, start: int = 0
) -> Iterator[RawRow]:
    """Yield the rows of a file of that kind without the first `start`.

    Raises DataError naming the place in the file, besides what reading the stream raises.
    """
    if kind in _TABLES:
        yield from _TABLES[kind](stream, origin, start)
    else:
        buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(_raw(stream), 1 << 20)
        text = as_utf8(buffered, encoding=options.encoding, origin=origin)
        yield from islice(_TEXTS[kind](text, origin, options), start, None)


def count_rows(
    stream: BinaryIO, kind: str, *, origin: str, at_most: int, options: ReadOptions = DEFAULT_OPTIONS
) -> int:
    """Return how many rows the file has, or `at_most`."""
    if kind == ".parquet":
        return min(at_most, num_parquet_rows(stream))
    return sum(1 for _ in islice(rows_of(stream, kind, origin=origin, options=options), at_most))


def _raw(stream: Any) -> io.RawIOBase:
    return stream  # type: ignore[no-any-return]  # what decompresses or downloads has `readinto`, all that is needed


def _json_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin):
        yield RawRow(origin, number, line)


def _plain_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin, keep_blanks_around=True):
        if line.startswith(b"\0") and not line.strip(b"\0"):
            raise DataError(f"{origin}, line {number}: has only zero bytes: the file was not written to its end.")
        yield RawRow(origin, number, {"text": decode_line(line, origin=origin, number=number)})


def _lines(stream: io.BufferedReader, origin: str, *, keep_blanks_around: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number; DataError where blank ones do not end."""
    last = 0
    for number, line in enumerate(iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""), start=1):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{origin}, line {number}: has more than {MAX_ROW_BYTES >> 20} MB: this is not a row.")
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        stripped = content.strip()
        if stripped:
            last = number
            yield number, content.rstrip(b"\r\n") if keep_blanks_around else stripped
        elif number - last > _MAX_BLANK_LINES:
            raise DataError(f"{origin}, line {last + 1}: more than {_MAX_BLANK_LINES:,} blank lines begin here.")


def _json(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    """Yield the objects of one array; a file whose first line is a whole value is read as JSON lines."""
    if options.records is not None:
        found = records_at(_parsed(_whole(stream, origin), origin), options.records, origin)
        yield from (RawRow(origin, number, value) for number, value in enumerate(found, start=1))
        return
    if stream.peek(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        for number, value in enumerate(_parsed(_whole(stream, origin), origin), start=1):
            if not isinstance(value, dict):
                raise DataError(f"{origin}, row {number}: each element of the array must be an object with columns.")
            yield RawRow(origin, number, value)
        return
    for place, (number, line) in enumerate(_lines(stream, origin)):
        if place == 0 and not _is_whole(line):
            _refuse_one_object(_parsed(line + b"\n" + _whole(stream, origin), origin), origin)
        yield RawRow(origin, number, line)


def _whole(stream: io.BufferedReader, origin: str) -> bytes:
    content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise DataError(f"{origin}: has more than {MAX_JSON_BYTES >> 30} GB. Write one object on each line, as .jsonl.")
    return content


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
        raise DataError(f"{origin}, line {_line_of(error)}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{origin}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}. "
            "The file must be an array of objects, or one object on each line."
        ) from error


def _line_of(error: UnicodeDecodeError) -> int:
    content: bytes = error.object
    return content.count(b"\n", 0, error.start) + 1


def _refuse_one_object(value: Any, origin: str) -> NoReturn:
    places = record_places(value)
    if places:
        advice = f"its rows seem to be in `{places[0]}`. Write `records: {places[0]}` beside its path."
    else:
        advice = "no list of objects is in it. Write its rows as an array, or as one object on each line."
    raise DataError(f"{origin}: is one object, not an array of objects; {advice}")


def records_at(value: Any, place: str, origin: str) -> Iterator[dict[str, Any]]:
    """Yield the objects at a dotted place; raises DataError where there is none.

    Lists on the way are joined: the other values of their objects are added to every object in them.
    """
    names = place.split(".")
    yield from _records(value, names, origin, place="", carried={})


def _records(
    value: Any, names: Sequence[str], origin: str, *, place: str, carried: Mapping[str, Any], number: int = 0
) -> Iterator[dict[str, Any]]:
    where = f"`{place}`" if place else "the file"
    if isinstance(value, list) and place:
        for index, each in enumerate(value, start=1):
            if not isinstance(each, dict):
                raise DataError(f"{origin}: element {index:,} of {where} is not an object with columns.")
            if names:
                others = {name: inner for name, inner in each.items() if name != names[0]}
                yield from _records(each, names, origin, place=place, carried={**carried, **others}, number=index)
            else:
                yield {**carried, **each}
        return
    if not names:
        raise DataError(f"{origin}: `records: {place}` is not a list of objects.{_places_advice(value, f'{place}.')}")
    if not isinstance(value, dict):
        raise DataError(f"{origin}: is an array already, or a single value. Remove `records`.")
    if names[0] not in value:
        at = f" of element {number:,}" if number else ""
        raise DataError(f"{origin}: `records`: there is no `{names[0]}` in {where}{at}.{_places_advice(value, '')}")
    inner_place = f"{place}.{names[0]}" if place else names[0]
    yield from _records(value[names[0]], names[1:], origin, place=inner_place, carried=carried)


def _places_advice(value: Any, prefix: str) -> str:
    places = record_places(value, prefix=prefix)
    return f" Lists of objects are in {', '.join(f'`{each}`' for each in places)}." if places else ""


def _csv(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    return delimited_rows(stream, origin, options, delimiter=",")


def _tsv(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    return delimited_rows(stream, origin, options, delimiter="\t")


_TEXTS: Mapping[str, Callable[[io.BufferedReader, str, ReadOptions], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".txt": _plain_lines,
    **dict.fromkeys(CONLL_KINDS, conll_rows),
}
_TABLES: Mapping[str, Callable[[BinaryIO, str, int], Iterator[RawRow]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
TEXT_KINDS, TABLE_KINDS = tuple(_TEXTS), tuple(_TABLES)
"""The endings that can be read; the texts also when they are compressed."""
