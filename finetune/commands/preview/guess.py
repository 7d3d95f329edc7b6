"""What files of rows seem to be: encoding, delimiter, header, where records are, and which format their columns fit.

A guess is printed with the lines of a job that say the same; training itself guesses none of it.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.config.section import CONLL_KINDS, DELIMITED_KINDS, TEXT_KINDS
from finetune.data.formats.hints import DELIMITERS
from finetune.data.rows import Row, record_places
from finetune.data.sources.files import DataFile, kind_of
from finetune.registry.formats import FORMATS

_SAMPLE_BYTES = 1 << 20
_SAMPLE_LINES = 50
_MAX_JSON_BYTES = 256 << 20
_NAME_LENGTH = 40
_LABEL_LENGTH = 40
_DEFAULTS = {".csv": ",", ".tsv": "\t"}

Keys = dict[str, Any]
"""Keys of a source in a job."""


def guess_keys(file: DataFile) -> Keys:
    """Return the keys without which the file would be read wrongly: encoding, delimiter, records."""
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
    if kind == ".json" and (place := _records(file, content, encoding)):
        keys["records"] = place
    return keys


def guess_encoding(content: bytes) -> str | None:
    """Return the encoding of a text without a byte order mark that is not UTF-8; None: UTF-8, or nobody knows."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    half = len(content) // 2
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if half and content[first::2].count(0) > 0.8 * half and not content[1 - first :: 2].count(0):
            return name
    readable = content[: content.rfind(b"\n") + 1] or content
    text = readable.decode("utf-8", "replace")
    if "\ufffd" not in text or any(not each.isascii() and each != "\ufffd" for each in text):
        return None  # UTF-8, or UTF-8 with damage, which is an error of its own
    try:
        readable.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def guess_delimiter(lines: Sequence[str], *, usual: str) -> str:
    """Return the delimiter that cuts the lines into most columns, the same number in all of them; else the usual one.

    >>> guess_delimiter(["a;b", "1;2"], usual=","), guess_delimiter(["text", "a, b; c"], usual=",")
    (';', ',')
    """
    widths = {each: _width(lines, each) for each in (usual, *DELIMITERS)}
    if widths[usual] > 1:
        return usual
    best = max(widths, key=lambda each: widths[each])
    return best if widths[best] > 1 else usual


def _width(lines: Sequence[str], delimiter: str) -> int:
    """Return the columns that all whole rows of the lines have; 0 where they differ."""
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
    """Return where the rows of a file with one JSON object are; None for an array, for lines, and where none are."""
    if not _text(content[:4096], encoding).lstrip().startswith("{"):
        return None
    try:
        value = json.loads(_text(file.beginning(_MAX_JSON_BYTES), encoding))
    except (ValueError, RecursionError):
        return None  # JSON lines, damaged, which is reported where the rows are read, or too large to look at
    if any(all(column in value for column in form.required) for form in FORMATS):
        return None  # it is a row itself
    places = record_places(value)
    return places[0] if places else None


def nested_records(row: Row) -> list[str]:
    """Return the names that lead to the innermost list of objects in a row: `[paragraphs, qas]` in SQuAD's."""
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [name, *nested_records(value[0])]
    return []


_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversation", "dialogue", "dialog", "chat"),
    "conversations": ("conversations",),
    "prompt": ("prompt", "question", "query", "instruction", "problem", "source", "input", "article", "document"),
    "completion": ("completion", "answer", "response", "output", "reply", "target", "solution", "summary"),
    "chosen": ("chosen", "preferred", "accepted", "response_chosen", "winner"),
    "rejected": ("rejected", "dispreferred", "refused", "response_rejected", "loser"),
    "text": ("text", "sentence", "review", "content", "comment", "tweet", "body", "utterance", "message", "document"),
    "label": ("label", "labels", "class", "category", "sentiment", "intent", "rating", "stars", "target", "score"),
    "tokens": ("tokens", "words"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
}
"""What the columns of formats are called by others, the likeliest first."""

_FORMATS_BY_NAMES = ("messages", "conversations", "preference", "prompt_completion", "tagged", "labelled", "text")


def guess_columns(rows: Sequence[Row], *, kind: str) -> Iterator[Keys]:
    """Yield format and columns that may fit these rows, the likeliest first; the first: as they are."""
    yield {}
    names = {str(name).strip().lower(): str(name) for name in reversed(list(rows[0]))}
    for form in _FORMATS_BY_NAMES:
        found = {column: _named(column, names) for column in FORMATS[form].required}
        if all(found.values()) and len(set(found.values())) == len(found):
            yield {"format": form, "columns": {name: yours for name, yours in found.items() if name != yours}}
    if kind in DELIMITED_KINDS and is_data(rows):
        yield from _positions([list(rows[0]), *(list(row.values()) for row in rows)])


def _named(column: str, names: Mapping[str, str]) -> str | None:
    return next((names[each] for each in _SYNONYMS[column] if each in names), None)


def is_data(rows: Sequence[Row]) -> bool:
    """Return whether the names of the columns seem to be a row of a file without a header."""
    names = [str(name) for name in rows[0]]
    repeated = any(str(row[name]) == name for row in rows for name in row)
    return repeated or any(_is_number(name) or len(name) > _NAME_LENGTH or name.count(" ") > 3 for name in names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _positions(rows: Sequence[Sequence[Any]]) -> Iterator[Keys]:
    """Yield the longest column as the text, and as the label the shortest of few values, where there is one."""
    columns = list(zip(*rows, strict=True))
    lengths = [sum(len(str(value)) for value in column) / len(column) for column in columns]
    text = max(range(len(columns)), key=lambda place: lengths[place])
    labels = [place for place in range(len(columns)) if place != text and lengths[place] <= _LABEL_LENGTH]
    if labels:
        label = min(labels, key=lambda place: (len(set(columns[place])), lengths[place]))
        yield {"columns": {"label": label, "text": text}}
    yield {"format": "text", "columns": {"text": text}}


def looks_like_conll(file: DataFile) -> bool:
    """Return whether a text of another kind holds a word and its tag per line, and blank lines between sentences."""
    kind, _ = kind_of(file.name)
    if kind in CONLL_KINDS or kind not in TEXT_KINDS:
        return False
    lines = _text(file.beginning(_SAMPLE_BYTES), None).splitlines()[:200]
    widths = {len(line.split()) for line in lines[:-1] if line.strip() and not line.startswith(("#", "-DOCSTART-"))}
    has_tags = any(line.split()[-1] == "O" for line in lines if line.strip())
    return len(widths) == 1 and widths.pop() > 1 and has_tags
