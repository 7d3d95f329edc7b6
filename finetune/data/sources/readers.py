"""Read rows from open files: JSON lines, JSON, CSV, TSV, plain text, CoNLL, Parquet and Arrow."""

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Literal

from finetune.config.section import CONLL_KINDS
from finetune.data.rows import RawRow, not_utf8, parse_json_at, parse_row_json, record_paths, shortened
from finetune.data.sources.decoding import DEFAULT_OPTIONS, ReadOptions, as_utf8, decode_line, decoded_chunks
from finetune.data.sources.tables import MAX_ROW_BYTES, arrow_rows, parquet_rows
from finetune.errors import DataError

MAX_JSON_BYTES = 2 << 30
"""The limit of a JSON file with one object, which is held in memory; arrays and JSON lines have no limit."""

MAX_SENTENCE_BYTES = 256 << 20
"""The limit of a sentence."""

_DOCUMENT_START = "-DOCSTART-"

_MAX_BLANK_LINES = 1_000_000
_MAX_BLANK_CHARACTERS = 4 << 20
"""Between two elements of an array."""
_ARRAY_CHUNK = 1 << 20
_SEPARATOR = re.compile(r"[ \t\r\n]*([],]?)[ \t\r\n]*")
_LONGEST_TOKEN = 16
"""Characters from where the decoder stops in a text that was cut, unless within a string, to its end."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_PATTERN = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_DELIMITER_NAMES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "pipe"}


def rows_of(
    stream: BinaryIO, kind: str, *, origin: str, options: ReadOptions = DEFAULT_OPTIONS, start: int = 0
) -> Iterator[RawRow]:
    """Yield the rows of a file of that format without the first `start`.

    Raises DataError naming the location in the file, and any exception of the stream.
    """
    if kind in _TABLES:
        yield from _TABLES[kind](stream, origin, start)
    else:
        raw: Any = stream  # decompressors and downloads implement `readinto`, which is sufficient
        buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(raw, 1 << 20)
        text = as_utf8(buffered, encoding=options.encoding, origin=origin)
        yield from islice(_TEXTS[kind](text, origin, options), start, None)


def _json_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin):
        yield RawRow(origin, number, line)


def _plain_lines(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    for number, line in _lines(stream, origin, keep_blanks_around=True):
        if line.startswith(b"\0") and not line.strip(b"\0"):
            raise DataError(f"{origin}, line {number}: has only zero bytes: the file was not written completely.")
        yield RawRow(origin, number, {"text": decode_line(line, origin=origin, number=number)})


def _lines(stream: io.BufferedReader, origin: str, *, keep_blanks_around: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines with their numbers; raises DataError for an endless run of blank lines."""
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
            raise DataError(f"{origin}, line {last + 1}: more than {_MAX_BLANK_LINES:,} blank lines start here.")


def _json(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    """Yield the objects of one array; a file whose first line is a complete value is read as JSON lines."""
    if options.records is not None:
        value, names = _parsed(_whole(stream, origin), origin), options.records.split(".")
        records = _records(value, names, origin, path="", carried={})
        yield from (RawRow(origin, number, record) for number, record in enumerate(records, start=1))
        return
    if stream.peek(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        yield from _array(stream, origin)
        return
    for index, (number, line) in enumerate(_lines(stream, origin)):
        is_cut = False
        if index == 0:
            try:
                json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                is_cut = True
            except (RecursionError, ValueError):
                pass  # reported where the row is read
        if is_cut:
            paths = record_paths(_parsed(line + b"\n" + _whole(stream, origin), origin))
            if paths:
                advice = f"its rows seem to be in `{paths[0]}`. Write `records: {paths[0]}` next to its path."
            else:
                advice = "it contains no list of objects. Write its rows as an array, or as one object per line."
            raise DataError(f"{origin}: is one object, not an array of objects; {advice}")
        yield RawRow(origin, number, line)


def _array(stream: io.BufferedReader, origin: str) -> Iterator[RawRow]:
    """Yield the objects of the array; no more than one of them and a chunk of the file is in memory."""
    chunks = decoded_chunks(stream, num_bytes=_ARRAY_CHUNK, origin=origin)
    text = next(chunks)
    while "[" not in text:
        text += next(chunks)
    start = text.index("[") + 1
    line, column = 1, 1  # of the first character of the text
    num_rows = 0
    while (separator := _SEPARATOR.match(text, start)) and separator[1] != "]":
        try:
            if separator[1] != ("," if num_rows else ""):
                missing = "',' or ']'" if num_rows else "value"
                raise json.JSONDecodeError(f"Expecting {missing}", text, separator.start(1))
            if text[separator.end() : separator.end() + 1] not in ("{", "]", ""):
                raise DataError("each element of the array must be an object with columns.")
            value, end = parse_json_at(text, separator.end())
        except DataError as error:
            raise DataError(f"{origin}, row {num_rows + 1}: {error}") from error
        except json.JSONDecodeError as error:
            if separator.end() == len(text) and len(text) - start > _MAX_BLANK_CHARACTERS:
                blanks = f"more than {_MAX_BLANK_CHARACTERS:,} blank characters start here."
                raise DataError(f"{origin}, row {num_rows + 1}: {blanks}") from error
            may_be_cut = error.msg.startswith("Unterminated") or error.pos > len(text) - _LONGEST_TOKEN
            num_chunks = 1 + (len(text) - start) // _ARRAY_CHUNK if may_be_cut else 0
            more = "".join(islice(chunks, num_chunks))  # doubled, so that a long row is parsed a few times at most
            if not more:
                before = column - 1 if error.lineno == 1 else 0
                error.lineno, error.colno = error.lineno + line - 1, error.colno + before
                raise _not_valid(error, origin) from error
            if len(text) - start > MAX_ROW_BYTES:
                size = f"has more than {MAX_ROW_BYTES >> 20} MB: this is not a row."
                raise DataError(f"{origin}, row {num_rows + 1}: {size}") from error
            num_newlines = text.count("\n", 0, start)
            column = start - text.rfind("\n", 0, start) if num_newlines else column + start
            line, text, start = line + num_newlines, text[start:] + more, 0
        else:
            num_rows, start = num_rows + 1, end
            yield RawRow(origin, num_rows, value)
    if text[start:].strip() != "]" or any(chunk.strip() for chunk in chunks):
        raise DataError(f"{origin}: not valid JSON: there is text after the end of the array.")


def _whole(stream: io.BufferedReader, origin: str) -> bytes:
    content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise DataError(f"{origin}: has more than {MAX_JSON_BYTES >> 30} GB. Write one object per line, as .jsonl.")
    return content


def _parsed(content: bytes, origin: str) -> Any:
    try:
        return parse_row_json(content.removeprefix(_BYTE_ORDER_MARK))
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{origin}, line {line}: {not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        raise _not_valid(error, origin) from error


def _not_valid(error: json.JSONDecodeError, origin: str) -> DataError:
    return DataError(
        f"{origin}, line {error.lineno}: not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}. "
        "The file must be an array of objects, or one object per line."
    )


def _records(
    value: Any, names: Sequence[str], origin: str, *, path: str, carried: Mapping[str, Any], number: int = 0
) -> Iterator[dict[str, Any]]:
    where = f"`{path}`" if path else "the file"
    if isinstance(value, list) and path:
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
        raise DataError(f"{origin}: `records: {path}` is not a list of objects.{_paths_advice(value, f'{path}.')}")
    if not isinstance(value, dict):
        raise DataError(f"{origin}: is already an array, or a single value. Remove `records`.")
    if names[0] not in value:
        at = f" of element {number:,}" if number else ""
        raise DataError(f"{origin}: `records`: there is no `{names[0]}` in {where}{at}.{_paths_advice(value, '')}")
    inner_path = f"{path}.{names[0]}" if path else names[0]
    yield from _records(value[names[0]], names[1:], origin, path=inner_path, carried=carried)


def _paths_advice(value: Any, prefix: str) -> str:
    paths = record_paths(value, prefix=prefix)
    return f" Lists of objects are in {', '.join(f'`{path}`' for path in paths)}." if paths else ""


def conll_rows(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
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
    width = num_bytes = 0
    for number, line in enumerate(iter(partial(stream.readline, MAX_SENTENCE_BYTES + 1), b""), start=1):
        if len(line) > MAX_SENTENCE_BYTES:
            raise DataError(
                f"{origin}, line {number}: has more than {MAX_SENTENCE_BYTES >> 20} MB: this is not a word."
            )
        text = decode_line(line, origin=origin, number=number)
        text = text.removeprefix("\ufeff" if number == 1 else "").strip("\r\n")
        if not text.strip():
            if sentence:
                yield sentence
            sentence, num_bytes = [], 0
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
        num_bytes += len(text)
        if num_bytes > MAX_SENTENCE_BYTES:
            raise DataError(f"{origin}, line {number}: the sentence has more than {MAX_SENTENCE_BYTES >> 20} MB.")
        sentence.append(fields)
    if sentence:
        yield sentence


@dataclass
class _DelimitedLines:
    """The lines of the file, and the position of the current row."""

    stream: io.BufferedReader
    origin: str
    num_bytes: int = 0  # of the current row
    number: int = 0  # of lines read
    first: int = 1  # first line of the current row

    def __iter__(self) -> Iterator[str]:
        for line in iter(partial(self.stream.readline, MAX_ROW_BYTES + 1), b""):
            self.num_bytes += len(line)
            if self.num_bytes > MAX_ROW_BYTES:
                raise DataError(
                    f"{self.origin}, line {self.first}: the row has more than {MAX_ROW_BYTES >> 20} MB: a quotation "
                    "mark in it is never closed, or this is not a CSV file. `quotes: false` reads them as characters."
                )
            text = decode_line(line, origin=self.origin, number=self.number + 1)
            if self.number == 0:
                text = text.removeprefix("\ufeff")
            for part in _LINE_PATTERN.findall(text) if "\r" in text else (text,):
                self.number += 1
                yield part


def delimited_rows(stream: io.BufferedReader, origin: str, options: ReadOptions, *, delimiter: str) -> Iterator[RawRow]:
    """Yield the rows of a CSV file: those below the header line, or all if columns have positions.

    Raises DataError with the line of a row that has more or fewer fields, or of damaged quotes or bytes.
    """
    csv.field_size_limit(sys.maxsize)  # the default limit is 128 KiB
    delimiter = options.delimiter or delimiter
    lines = _DelimitedLines(stream, origin)
    names: Sequence[str] | None = None
    number = 0
    for fields in _parsed_fields(lines, origin, delimiter=delimiter, quotes=options.quotes):
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
                f"{origin}, row {number} (line {lines.number}): has {len(fields)} fields, but {first} has "
                f"{len(names)}. A {_DELIMITER_NAMES.get(delimiter, f'`{delimiter}`')} inside a text must be "
                "quoted."
            )
        yield RawRow(origin, number, dict(zip(names, fields, strict=True)))


def _parsed_fields(lines: _DelimitedLines, origin: str, *, delimiter: str, quotes: bool | None) -> Iterator[list[str]]:
    """Yield the fields of each row that is not a blank line."""
    quoting: Literal[0, 3] = csv.QUOTE_NONE if quotes is False else csv.QUOTE_MINIMAL
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True, quoting=quoting)
    while True:
        lines.first, lines.num_bytes = lines.number + 1, 0
        try:
            fields = next(reader, None)
        except csv.Error as error:
            advice = "A quotation mark inside of quotes is written twice; `quotes: false` reads them as characters."
            problem = f"{error}. {advice}"
            if "unexpected end of data" in str(error):
                problem = (
                    "a quotation mark in the row that starts here is not closed before the end of the file (line "
                    f"{lines.number}). Close it, or write `quotes: false` if quotation marks are ordinary characters."
                )
            raise DataError(f"{origin}, line {lines.first}: not valid CSV: {problem}") from error
        if fields is None:
            return
        may_be_merged = lines.number > lines.first and delimiter == "\t" and quotes is None
        if may_be_merged and any("\t" in field and ("\n" in field or "\r" in field) for field in fields):
            raise DataError(
                f"{origin}, lines {lines.first} to {lines.number}: are one row, since a quotation mark at the start of "
                "a field is closed several lines later, with tabs in between. Write `quotes: false` next to the path "
                "if quotation marks are ordinary characters, `quotes: true` if this is one row."
            )
        if fields:
            yield fields


_TEXTS: Mapping[str, Callable[[io.BufferedReader, str, ReadOptions], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": partial(delimited_rows, delimiter=","),
    ".tsv": partial(delimited_rows, delimiter="\t"),
    ".txt": _plain_lines,
    **dict.fromkeys(CONLL_KINDS, conll_rows),
}
_TABLES: Mapping[str, Callable[[BinaryIO, str, int], Iterator[RawRow]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
TEXT_KINDS, TABLE_KINDS = tuple(_TEXTS), tuple(_TABLES)
"""The supported extensions; text formats may also be compressed."""
