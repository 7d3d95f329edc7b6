"""Guess the keys that a file of rows needs to be read correctly: encoding, delimiter, records, positions of columns."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.config.section import CONLL_KINDS, DELIMITED_KINDS, TEXT_KINDS
from finetune.data.formats.columns import DELIMITERS
from finetune.data.formats.value_kinds import is_prose
from finetune.data.rows import Row, record_paths
from finetune.data.sources.files import DataFile, kind_of
from finetune.registry.formats import FORMATS

Keys = dict[str, Any]
"""The keys of a data source in a job."""

_SAMPLE_BYTES = 1 << 20
_SAMPLE_LINES = 50
_MAX_JSON_BYTES = 256 << 20
_NAME_LENGTH = 40
_LABEL_LENGTH = 40
_DEFAULTS = {".csv": ",", ".tsv": "\t"}


def guess_keys(file: DataFile) -> Keys:
    """Return the keys that the file needs to be read correctly: encoding, delimiter, records."""
    kind, _ = kind_of(file.name)
    if kind not in TEXT_KINDS:
        return {}
    content = file.beginning(_SAMPLE_BYTES)
    encoding = guess_encoding(content)
    keys: Keys = {} if encoding is None else {"encoding": encoding}
    if kind in DELIMITED_KINDS:
        lines = _text(content, encoding).splitlines()[:_SAMPLE_LINES]
        delimiter = guess_delimiter(lines, usual=_DEFAULTS[kind])
        if delimiter != _DEFAULTS[kind]:
            keys["delimiter"] = delimiter
    if kind == ".json" and (records := _records(file, content, encoding)):
        keys["records"] = records
    return keys


def guess_encoding(content: bytes) -> str | None:
    """Return the encoding of a text that is not UTF-8 and has no byte order mark; None for UTF-8 or if unknown."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    half = len(content) // 2
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if half and content[first::2].count(0) > 0.8 * half and not content[1 - first :: 2].count(0):
            return name
    readable = content[: content.rfind(b"\n") + 1] or content
    text = readable.decode("utf-8", "replace")
    if "\ufffd" not in text or any(not character.isascii() and character != "\ufffd" for character in text):
        return None  # UTF-8, or damaged UTF-8, which reading reports
    try:
        readable.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def guess_delimiter(lines: Sequence[str], *, usual: str) -> str:
    """Return the delimiter that splits all lines into the same, largest number of columns; else the usual one.

    >>> guess_delimiter(["a;b", "1;2"], usual=","), guess_delimiter(["text", "a, b; c"], usual=",")
    (';', ',')
    """
    widths = {delimiter: _width(lines, delimiter) for delimiter in (usual, *DELIMITERS)}
    if widths[usual] > 1:
        return usual
    best = max(widths, key=lambda delimiter: widths[delimiter])
    return best if widths[best] > 1 else usual


def _width(lines: Sequence[str], delimiter: str) -> int:
    """Return the number of columns that all complete rows have; 0 if they differ."""
    try:
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error:
        return 0
    widths = {len(row) for row in rows[:-1] or rows}
    return widths.pop() if len(widths) == 1 else 0


def _text(content: bytes, encoding: str | None) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    return content.decode(encoding or "utf-8-sig", "replace")


def _records(file: DataFile, content: bytes, encoding: str | None) -> str | None:
    """Return the path of the rows in a file with one JSON object; None for an array, JSON lines, or without rows."""
    if not _text(content[:4096], encoding).lstrip().startswith("{"):
        return None
    try:
        value = json.loads(_text(file.beginning(_MAX_JSON_BYTES), encoding))
    except (ValueError, RecursionError):
        return None  # JSON lines; damaged, which reading reports; or too large to parse here
    if any(all(column in value for column in form.required) for form in FORMATS):
        return None  # the object itself is a row
    paths = record_paths(value)
    return paths[0] if paths else None


def is_data(rows: Sequence[Row]) -> bool:
    """Return whether the column names look like a row, as in a file without a header."""
    names = [str(name) for name in rows[0]]
    repeated = any(str(row[name]) == name for row in rows for name in row)
    return repeated or any(_is_number(name) or len(name) > _NAME_LENGTH or name.count(" ") > 3 for name in names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def guess_positions(rows: Sequence[Row], *, kind: str) -> Iterator[tuple[Mapping[str, int], str]]:
    """Yield `columns` by position and the format of a delimited file without a header, most likely first.

    The longest column is the text, and the short column of fewest values, if there is one, the label.
    """
    if kind not in DELIMITED_KINDS or not is_data(rows):
        return
    values = [list(rows[0]), *(list(row.values()) for row in rows)]
    columns = list(zip(*values, strict=True))
    lengths = [sum(len(str(value)) for value in column) / len(column) for column in columns]
    text = max(range(len(columns)), key=lambda index: lengths[index])
    labels = [index for index in range(len(columns)) if index != text and lengths[index] <= _LABEL_LENGTH]
    if labels:
        label = min(labels, key=lambda index: (len(set(columns[index])), lengths[index]))
        prose = [index for index, column in enumerate(columns) if index != label and is_prose(column)]
        if len(prose) == 2:
            yield {"label": label, "text": prose[0], "text_pair": prose[1]}, "labelled"
        yield {"label": label, "text": text}, "labelled"
    yield {"text": text}, "text"


def looks_like_conll(file: DataFile) -> bool:
    """Return whether a file of another type has a word and its tag per line, and blank lines between sentences."""
    kind, _ = kind_of(file.name)
    if kind in CONLL_KINDS or kind not in TEXT_KINDS:
        return False
    lines = _text(file.beginning(_SAMPLE_BYTES), None).splitlines()[:200]
    widths = {len(line.split()) for line in lines[:-1] if line.strip() and not line.startswith(("#", "-DOCSTART-"))}
    has_tags = any(line.split()[-1] == "O" for line in lines if line.strip())
    return len(widths) == 1 and widths.pop() > 1 and has_tags
