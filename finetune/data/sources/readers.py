"""Read rows from open files: JSON lines, JSON, CSV, TSV, plain text, CoNLL, Parquet and Arrow."""

import codecs
import csv
import io
import json
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from finetune.config.section import CONLL_KINDS, KINDS_OF_KEYS, KINDS_WITH_POSITIONS
from finetune.config.sections.data import SourceSection
from finetune.data.rows import RawRow, not_utf8, parse_row_json, shortened
from finetune.data.sources.tables import arrow_rows, parquet_rows
from finetune.errors import DataError

MAX_JSON_BYTES = 2 << 30
"""The limit of a JSON file with one array or object, which is held in memory; JSON lines have no limit."""

MAX_ROW_BYTES = 256 << 20
"""The limit of a line, and of a field of a CSV file."""

_DOCUMENT_START = "-DOCSTART-"
_DELIMITER_NAMES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "pipe"}


@dataclass(frozen=True)
class ReadOptions:
    """The defaults read every file as UTF-8, with the delimiter of its extension and a header."""

    delimiter: str | None = None
    quotes: bool | None = None
    encoding: str | None = None
    records: str | None = None
    has_header: bool = True
    names: tuple[tuple[int, str], ...] = ()  # of columns by position, without a header

    def identity(self) -> Mapping[str, Any]:
        """Return the options that differ from the defaults, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value != getattr(DEFAULT_OPTIONS, name)}

    def column_name(self, position: int) -> str:
        """Return the name of a column without a header: the configured name, or else its position."""
        return dict(self.names).get(position, str(position))


DEFAULT_OPTIONS = ReadOptions()


def read_options(section: SourceSection, endings: Iterable[str], *, key: str) -> ReadOptions:
    """Return the options for files with these extensions; raises DataError for an option that they do not have."""
    limited = {
        name: (allowed, "it is") for name, allowed in KINDS_OF_KEYS.items() if getattr(section, name) is not None
    }
    if section.has_positions:
        limited = {"columns": (KINDS_WITH_POSITIONS, "columns by position are"), **limited}
    for name, (allowed, what) in limited.items():
        if others := sorted(set(endings) - set(allowed)):
            kinds = ", ".join(allowed)
            raise DataError(f"{key}.{name}: {what} read in {kinds} files only, not in {others[0]} files. Remove it.")
    return ReadOptions(
        section.delimiter,
        section.quotes,
        section.encoding,
        section.records,
        has_header=not section.has_positions,
        names=tuple(sorted(section.named_positions.items())),
    )


def rows_of(
    stream: BinaryIO, kind: str, *, origin: str, options: ReadOptions = DEFAULT_OPTIONS, start: int = 0
) -> Iterator[RawRow]:
    """Yield the rows of a file of that format without the first `start`.

    Raises DataError naming the location in the file, and any exception of the stream.
    """
    if kind in _TABLES:
        yield from _TABLES[kind](stream, origin, start)
    else:
        text = _as_utf8(stream, encoding=options.encoding, origin=origin)
        yield from islice(_TEXTS[kind](text, origin, options), start, None)


_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHUNK_BYTES = 1 << 20


def _as_utf8(stream: BinaryIO, *, encoding: str | None, origin: str) -> io.BufferedReader:
    """Return the stream as UTF-8 without a byte order mark.

    It is transcoded if an encoding is configured or a byte order mark indicates one. Raises DataError if it looks like
    UTF-16 without a byte order mark.
    """
    raw: Any = stream  # decompressors and downloads implement `readinto`, which is sufficient
    text = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(raw, _CHUNK_BYTES)
    if encoding is None:
        start = text.peek(4)[:4]
        encoding = next((name for mark, name in _MARKS if start.startswith(mark)), "utf-8")
        if encoding == "utf-8" and 0 in start[:2]:
            raise DataError(
                f"{origin}: has a zero byte at its start. If it is UTF-16 without a byte order mark, write "
                f"`encoding: utf-16-{'be' if start[:1] == bytes(1) else 'le'}` next to its path; else it was not "
                "written completely."
            )
    if codecs.lookup(encoding).name != "utf-8":
        text = io.BufferedReader(_Transcoded(text, encoding, origin), _CHUNK_BYTES)
    if text.peek(3).startswith(codecs.BOM_UTF8):
        text.read(3)
    return text


class _Transcoded(io.RawIOBase):
    """Reads text in any encoding as UTF-8; raises DataError naming the line of an invalid byte."""

    def __init__(self, stream: BinaryIO, encoding: str, origin: str) -> None:
        self._stream, self._encoding, self._origin = stream, encoding, origin
        self._decoder: Any = codecs.getincrementaldecoder(encoding)()
        self._pending = b""
        self._line = 1  # of the next byte

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with UTF-8 and return the number of bytes; 0 at the end."""
        while not self._pending:
            chunk = self._stream.read(_CHUNK_BYTES)
            try:
                self._pending = self._decoder.decode(chunk, final=not chunk).encode("utf-8")
            except UnicodeError as error:
                line, reason = self._line, str(error)
                if isinstance(error, UnicodeDecodeError):
                    before = error.object[: error.start].decode(error.encoding, errors="ignore")
                    line += before.count("\n")
                    reason = f"byte 0x{error.object[error.start]:02x} ({error.reason})"
                raise DataError(
                    f"{self._origin}, line {line}: not {self._encoding}: {reason}. Write another `encoding` (without a "
                    "byte order mark `utf-16-le` or `utf-16-be`), or fix the line."
                ) from error
            self._line += self._pending.count(b"\n")
            if not chunk:
                break
        output = self._pending[: len(buffer)]
        buffer[: len(output)] = output
        self._pending = self._pending[len(output) :]
        return len(output)


def _lines(stream: io.BufferedReader, origin: str) -> Iterator[tuple[int, bytes]]:
    """Yield all lines with their numbers; raises DataError for one that is too long."""
    for number, line in enumerate(iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""), start=1):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{origin}, line {number}: has more than {MAX_ROW_BYTES >> 20} MB: this is not a row.")
        yield number, line


def _texts(stream: io.BufferedReader, origin: str) -> Iterator[tuple[int, str]]:
    """Yield all lines as text with their numbers; raises DataError naming line and byte of invalid UTF-8."""
    for number, line in _lines(stream, origin):
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}, line {number}: {not_utf8(error)}") from error


def _json_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    return (RawRow(origin, number, line.strip()) for number, line in _lines(stream, origin) if line.strip())


def _plain_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    for number, line in _texts(stream, origin):
        if line.startswith("\0") and not line.strip("\0"):
            raise DataError(f"{origin}, line {number}: has only zero bytes: the file was not written completely.")
        if line.strip(string.whitespace):
            yield RawRow(origin, number, {"text": line.rstrip("\r\n")})


def _json(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    """Yield the objects of one array; a file whose first line is a complete value is read as JSON lines."""
    is_array = stream.peek(4096).lstrip().startswith(b"[")
    if is_array or options.records is not None:
        names = options.records.split(".") if options.records is not None else []
        records = _records(_parsed(_whole(stream, origin), origin), names, origin)
        yield from (RawRow(origin, number, record) for number, record in enumerate(records, start=1))
        return
    for index, raw in enumerate(_json_lines(stream, origin, options)):
        line = raw.content
        if index == 0 and isinstance(line, bytes) and not _is_complete(line):
            _parsed(line + b"\n" + _whole(stream, origin), origin)
            raise DataError(
                f"{origin}: is one object, not an array of objects. If its rows are in a list inside of it, write "
                "`records: KEY` next to its path (`finetune preview FILE` finds it)."
            )
        yield raw


def _is_complete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (RecursionError, ValueError):
        pass  # reported where the row is read
    return True


def _whole(stream: io.BufferedReader, origin: str) -> bytes:
    content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise DataError(f"{origin}: has more than {MAX_JSON_BYTES >> 30} GB. Write one object per line, as .jsonl.")
    return content


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return parse_row_json(content)
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{origin}, line {line}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{origin}, line {error.lineno}: not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}. "
            "The file must be an array of objects, or one object per line."
        ) from error


def _records(
    value: Any,
    names: Sequence[str],
    origin: str,
    *,
    path: str = "",
    carried: Mapping[str, Any] = MappingProxyType({}),
    number: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of the list under these names; other values on the way are added to each of them."""
    where = f"`{path}`" if path else "the file"
    if isinstance(value, list) and (path or not names):
        for index, record in enumerate(value, start=1):
            if not isinstance(record, dict):
                raise DataError(f"{origin}: element {index:,} of {where} is not an object with columns.")
            if names:
                others = {name: inner for name, inner in record.items() if name != names[0]}
                yield from _records(record, names, origin, path=path, carried={**carried, **others}, number=index)
            else:
                yield {**carried, **record}
        return
    if not names:
        raise DataError(f"{origin}: `records: {path}` is not a list of objects. Name the list.")
    if not isinstance(value, dict):
        raise DataError(f"{origin}: is already an array, or a single value. Remove `records`.")
    if names[0] not in value:
        at = f" of element {number:,}" if number else ""
        raise DataError(f"{origin}: `records`: there is no `{names[0]}` in {where}{at}.")
    inner_path = f"{path}.{names[0]}" if path else names[0]
    yield from _records(value[names[0]], names[1:], origin, path=inner_path, carried=carried)


def _conll_rows(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    """Yield a row per sentence: `tokens` and `tags` from the first and the last column, or columns by position.

    Each line has a word and its tags, and a blank line ends a sentence (Tjong Kim Sang & De Meulder, 2003,
    https://aclanthology.org/W03-0419).
    Lines with `-DOCSTART-` and comments before a sentence are skipped. Raises DataError naming the line if it has more
    or fewer columns than the first one.
    """
    for number, sentence in enumerate(_sentences(stream, origin), start=1):
        columns = [list(column) for column in zip(*sentence, strict=True)]
        if options.has_header:  # no column names are configured
            row = {"tokens": columns[0], "tags": columns[-1]}
        else:
            row = {options.column_name(position): column for position, column in enumerate(columns)}
        yield RawRow(origin, number, row)


def _sentences(stream: io.BufferedReader, origin: str) -> Iterator[list[list[str]]]:
    """Yield the words and tags of each sentence, all with the same number of columns."""
    sentence: list[list[str]] = []
    width = 0
    for number, line in _texts(stream, origin):
        text = line.strip("\r\n")
        if not text.strip():
            if sentence:
                yield sentence
            sentence = []
            continue
        fields = text.split("\t") if "\t" in text else text.split()
        # a comment before a sentence's first word, such as `# text = ...`, and not the word `#`
        is_comment = text.startswith("# ") and ("=" in text or len(fields) != (width or 2))
        if fields[0] == _DOCUMENT_START or (not sentence and is_comment):
            continue
        width = width or len(fields)
        if width < 2:
            raise DataError(
                f"{origin}, line {number}: has one column, but each line needs a word and its tag, separated by a "
                "space or a tab."
            )
        if len(fields) != width:
            raise DataError(
                f"{origin}, line {number}: has {len(fields)} column{'s' * (len(fields) != 1)}, but the lines before "
                f"it have {width}. Each line is a word and its tags; a blank line ends a sentence."
            )
        sentence.append(fields)
    if sentence:
        yield sentence


def _delimited_rows(
    stream: io.BufferedReader, origin: str, options: ReadOptions, *, delimiter: str
) -> Iterator[RawRow]:
    """Yield the rows of a CSV file: those below the header line, or all if columns have positions.

    Raises DataError with the line of a row that has more or fewer fields, or of damaged quotes or bytes.
    """
    delimiter = options.delimiter or delimiter
    names: Sequence[str] | None = None
    number = 0
    for line, fields in _parsed_fields(stream, origin, delimiter=delimiter, quotes=options.quotes):
        if names is None:
            if options.has_header:
                # all but the first column without a name are named by their position
                blank = fields.index("") if "" in fields else 0
                names = [name or ("" if position == blank else str(position)) for position, name in enumerate(fields)]
                if len(set(names)) < len(names):
                    twice = shortened(next(name for name, count in Counter(names).items() if count > 1))
                    raise DataError(f"{origin}: the header has the column `{twice}` twice. Keep one of them.")
                continue
            names = [options.column_name(position) for position in range(len(fields))]
        number += 1
        if len(fields) == len(names) + 1 and not fields[-1]:
            fields.pop()  # a trailing delimiter
        if len(fields) != len(names):
            first = "the header" if options.has_header else "the first row"
            raise DataError(
                f"{origin}, row {number} (line {line}): has {len(fields)} fields, but {first} has "
                f"{len(names)}. A {_DELIMITER_NAMES.get(delimiter, f'`{delimiter}`')} inside a text must be "
                "quoted."
            )
        yield RawRow(origin, number, dict(zip(names, fields, strict=True)))


def _parsed_fields(
    stream: io.BufferedReader, origin: str, *, delimiter: str, quotes: bool | None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row that is not a blank line, and the number of its last line."""
    quoting: Literal[0, 3] = csv.QUOTE_NONE if quotes is False else csv.QUOTE_MINIMAL
    csv.field_size_limit(MAX_ROW_BYTES)  # the default limit is 128 KiB
    # lines may also end with a carriage return alone
    lines = (line for _, text in _texts(stream, origin) for line in io.StringIO(text, newline=""))
    reader = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{origin}, line {first}: not valid CSV: {error} (line {reader.line_num}). Close every quotation mark, "
                "and write one inside of quotes twice; `quotes: false` reads them as ordinary characters."
            ) from error
        if fields is None:
            return
        may_be_merged = reader.line_num > first and delimiter == "\t" and quotes is None
        if may_be_merged and any("\t" in field and ("\n" in field or "\r" in field) for field in fields):
            raise DataError(
                f"{origin}, lines {first} to {reader.line_num}: are one row, since a quotation mark at the start of "
                "a field is closed several lines later, with tabs in between. Write `quotes: false` next to the path "
                "if quotation marks are ordinary characters, `quotes: true` if this is one row."
            )
        if fields:
            yield reader.line_num, fields


_TEXTS: Mapping[str, Callable[[io.BufferedReader, str, ReadOptions], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": partial(_delimited_rows, delimiter=","),
    ".tsv": partial(_delimited_rows, delimiter="\t"),
    ".txt": _plain_lines,
    **dict.fromkeys(CONLL_KINDS, _conll_rows),
}
_TABLES: Mapping[str, Callable[[BinaryIO, str, int], Iterator[RawRow]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
TEXT_KINDS, TABLE_KINDS = tuple(_TEXTS), tuple(_TABLES)
"""The supported extensions; text formats may also be compressed."""
