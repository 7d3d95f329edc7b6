"""`finetune preview FILE`: the contents of data files, the format they would be read as, and job lines that do so."""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.commands.printing import print_facts
from finetune.config.paths import is_url
from finetune.config.section import CONLL_KINDS, DELIMITED_KINDS, TEXT_KINDS
from finetune.config.sections.data import TrainingSourceSection
from finetune.config.sections.model import ModelSection, TokenizerSection
from finetune.data.formats.columns import DELIMITERS, quoted_list
from finetune.data.rows import RawRow, Row, record_paths, shortened
from finetune.data.sources.files import DataFile, Files, kind_of
from finetune.data.sources.source import Source, find_origin, open_source, texts_of
from finetune.errors import DataError, FinetuneError, UserError
from finetune.model.tokenizer import load_tokenizer
from finetune.registry.formats import FORMATS
from finetune.runtime.optional import no_op
from finetune.runtime.text.terminal import format_json, quiet_libraries

MAX_ROWS = 100_000
"""Maximum number of rows that are read in full: more would take minutes."""

_REASONS = {
    "encoding": "it is not UTF-8",
    "delimiter": "it splits all lines into the same number of columns",
    "records": "the file is a single object that contains this list of objects",
}
_GUESSED_ROWS = 50
_SHOWN_CHARACTERS = 300

Keys = dict[str, Any]
"""The keys of a data source in a job."""

_KEY = "data.train"
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class ReadRows:
    """The result of reading all rows, or the first MAX_ROWS."""

    num_rows: int
    is_all: bool
    lengths: Sequence[int]  # per row, in tokens, or in characters without a tokenizer
    error: DataError | None  # at the first row that cannot be read


def preview_file(path: str, *, num_rows: int, tokenizer: str | None) -> None:
    """Print columns, first rows, format and lengths of the files, and the lines of a job that reads them.

    Raises DataError with file and line of the first unreadable row, after the readable rows have been printed.
    """
    quiet_libraries(is_main=True)
    counter = None
    if tokenizer is not None:
        section = ModelSection(tokenizer=TokenizerSection(name=tokenizer))
        try:
            counter = load_tokenizer(section, texts=list, cache_folder=Path(), log=no_op)
        except FinetuneError as error:
            raise UserError(f"--tokenizer: {error}") from error
    source, keys, rows = look_into(path, num_rows=num_rows)
    if source is None:
        print(_no_format(keys, rows[0]))
        return
    form = str(source.format.identity()[0])
    read = _read(source, counter)
    print_facts(_facts_of_rows(read, form, is_tokens=counter is not None))
    print("\n" + job_lines(keys, form, longest=max(read.lengths, default=0) if counter is not None else None))
    if read.error is not None:
        raise read.error


def look_into(path: str, *, num_rows: int) -> tuple[Source | None, Keys, list[Row]]:
    """Print columns and first rows of the files; return their source, the keys that select it, and the first rows.

    Without a format that can read them, there is no source.
    """
    address = path if is_url(path) else str(Path(path).expanduser().absolute())
    origin = find_origin(TrainingSourceSection(path=address), key=_KEY, log=print)
    keys: Keys = {"path": address}
    kind, files = "", f"{origin.name}: a folder of images with one subfolder per class"
    if isinstance(origin, Files):
        shards: Sequence[DataFile] = origin.shards()
        keys |= guess_keys(shards[0])
        if looks_like_conll(shards[0]):
            name, ending = shards[0].name, kind_of(shards[0].name)[0]
            print(f"{name} looks like a CoNLL file: rename it from {ending} to .conll to read words and tags")
        names = ", ".join(shard.name for shard in shards[:3]) + (", ..." if len(shards) > 3 else "")
        kind, files = origin.kind, f"{len(shards):,} of kind {origin.kind}: {names}"
    guessed = [(name, f"{format_json(keys[name])}, guessed: {why}") for name, why in _REASONS.items() if name in keys]
    print_facts([("files", files), *guessed])
    rows = _first_rows(keys, max(num_rows, _GUESSED_ROWS))
    source = None
    for guess in guess_columns(rows, kind=kind):
        try:
            source = open_source(TrainingSourceSection(**keys, **guess), key=_KEY, log=no_op)
            for raw in islice(source.rows(), _GUESSED_ROWS):
                source.format.read(raw)
        except DataError:
            source = None
            continue
        keys |= guess
        break
    _print_rows(keys, num_rows)
    return source, keys, rows


def job_lines(keys: Keys, form: str, *, longest: int | None) -> str:
    """Return the lines of a job that reads the rows; `longest` is in tokens, None without a tokenizer."""
    names = ["path", "format", *(name for name in keys if name not in ("path", "format"))]
    written = {**keys, "format": form}
    lines = [f"    {name}: {_yaml(written[name])}" for name in names if written.get(name) not in (None, {})]
    known = None if longest is None else next((length for length in _LENGTHS if length >= longest), longest)
    if form == "image_label":
        max_length = []
    elif known is None:
        max_length = ["  max_length: 512  # `--tokenizer NAME` counts the tokens of each row"]
    else:
        max_length = [f"  max_length: {known}  # the longest row has {longest:,} tokens, without a chat template"]
    task = f"task: {{name: {FORMATS[form].usual_task}}}  # one that reads this format"
    return "\n".join(["Add to the job:", "", "data:", "  train:", *lines, *max_length, task])


def _first_rows(keys: Keys, max_rows: int) -> list[Row]:
    origin = find_origin(TrainingSourceSection(**keys), key=_KEY, log=no_op)
    raws = (raw for shard in origin.shards() for raw in shard.rows())
    rows = [raw.parse() for raw in islice(raws, max_rows)]
    if not rows:
        raise DataError(f"{origin.name} has no rows.")
    return rows


def _print_rows(keys: Keys, num_rows: int) -> None:
    rows = _first_rows(keys, num_rows)
    is_by_position = TrainingSourceSection(**keys).has_positions
    header = "no header (guessed: the first line looks like a row); by position " if is_by_position else ""
    print_facts([("columns", f"{header}{quoted_list(rows[0])}")])
    for number, row in enumerate(rows, start=1):
        print(f"\nrow {number}")
        for name, value in islice(row.items(), _GUESSED_ROWS):
            text = value if isinstance(value, str) else format_json(value, default=str)
            print(f"  {shortened(name)}: {_shown(text)}")
        if len(row) > _GUESSED_ROWS:
            print(f"  ... and {len(row) - _GUESSED_ROWS:,} more columns")
    print()


def _shown(text: str) -> str:
    line = re.sub(r"\s*[\r\n]+\s*", " ↵ ", text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}... ({len(text):,} characters)"


def _read(source: Source, tokenizer: Any) -> ReadRows:
    lengths: list[int] = []
    rows = source.rows()
    try:
        for raw in islice(rows, MAX_ROWS):
            lengths.append(_length(source, raw, tokenizer))
        is_all = next(rows, None) is None
    except DataError as error:
        return ReadRows(len(lengths), False, lengths, error)
    return ReadRows(len(lengths), is_all, lengths, None)


def _length(source: Source, raw: RawRow, tokenizer: Any) -> int:
    texts = list(texts_of(source.format.read(raw)))
    if tokenizer is None:
        return sum(map(len, texts))
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _facts_of_rows(read: ReadRows, form: str, *, is_tokens: bool) -> Iterator[tuple[str, str]]:
    yield "format", f"`{form}`: {quoted_list(FORMATS[form].required)}"
    stopped = "" if read.error is None else ", up to one that cannot be read"
    yield "rows", f"{read.num_rows:,}" + (stopped or ("" if read.is_all else ", the rest was not read"))
    if read.lengths and form != "image_label":
        lengths = sorted(read.lengths)
        quantiles = (
            f"{name} {lengths[math.ceil(share * len(lengths)) - 1]:,}"
            for name, share in (("median", 0.5), ("99%", 0.99))
        )
        unit = "tokens" if is_tokens else "characters"
        yield unit, f"{', '.join(quantiles)}, longest {lengths[-1]:,}, total {sum(lengths):,}"


def _no_format(keys: Keys, row: Row) -> str:
    formats = "\n".join(f"  {form.name}: {quoted_list(form.required)}" for form in FORMATS)
    block = "\n".join(f"    {name}: {_yaml(value)}" for name, value in keys.items())
    inner = nested_records(row)
    records = ".".join([keys["records"], *inner]) if "records" in keys and inner else None
    deeper = f"`records: {records}` makes rows of the nested lists.\n" if records is not None else ""
    return (
        f"{deeper}No format has the columns {quoted_list(row)}. Map the columns with `columns`, or build them "
        "with a `template`:\n\n"
        f"data:\n  train:\n{block}\n    format: FORMAT\n    columns: {{COLUMN OF THE FORMAT: YOURS}}\n\n"
        f"Formats and their columns:\n{formats}"
    )


_YAML_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "~", ".nan", ".inf")
"""Texts that YAML parses as something other than a string."""


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line: JSON, with quotes only where needed."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_yaml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/~.][\w./~-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    return format_json(value)


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


def nested_records(row: Row) -> list[str]:
    """Return the keys that lead to the innermost list of objects in a row: `[paragraphs, qas]` in SQuAD."""
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
"""Other names of the formats' columns, most likely first."""

_FORMATS_BY_NAMES = ("messages", "conversations", "preference", "prompt_completion", "tagged", "labelled", "text")


def guess_columns(rows: Sequence[Row], *, kind: str) -> Iterator[Keys]:
    """Yield the keys `format` and `columns` that may fit these rows, most likely first; the first guess has no keys."""
    yield {}
    names = {str(name).strip().lower(): str(name) for name in reversed(list(rows[0]))}
    for form in _FORMATS_BY_NAMES:
        columns = {
            column: next((names[synonym] for synonym in _SYNONYMS[column] if synonym in names), None)
            for column in FORMATS[form].required
        }
        if form == "labelled" and columns["label"] and (pair := _two_texts(rows, [columns["label"]])):
            texts = dict(zip(("text", "text_pair"), pair, strict=True))
            yours = {name: column for name, column in (*texts.items(), ("label", columns["label"])) if name != column}
            yield {"format": form, "columns": yours}
        if all(columns.values()) and len(set(columns.values())) == len(columns):
            yield {"format": form, "columns": {name: yours for name, yours in columns.items() if name != yours}}
    if kind in DELIMITED_KINDS and is_data(rows):
        yield from _positions([list(rows[0]), *(list(row.values()) for row in rows)])


def _two_texts(rows: Sequence[Mapping[Any, Any]], others: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the two columns of texts, in their order; None unless there are exactly two besides the others.

    Most values of a text column are different texts of several words.
    """
    texts = []
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        words = [value for value in values if isinstance(value, str) and " " in value.strip()]
        if name not in others and len(words) > len(values) / 2 and len(set(words)) > len(words) / 2:
            texts.append(name)
    return (texts[0], texts[1]) if len(texts) == 2 else None


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


def _positions(rows: Sequence[Sequence[Any]]) -> Iterator[Keys]:
    """Yield the longest column as the text, with the short column of fewest values as the label, if there is one."""
    columns = list(zip(*rows, strict=True))
    lengths = [sum(len(str(value)) for value in column) / len(column) for column in columns]
    text = max(range(len(columns)), key=lambda index: lengths[index])
    labels = [index for index in range(len(columns)) if index != text and lengths[index] <= _LABEL_LENGTH]
    if labels:
        label = min(labels, key=lambda index: (len(set(columns[index])), lengths[index]))
        numbered: list[dict[Any, Any]] = [dict(enumerate(row)) for row in rows]
        if pair := _two_texts(numbered, [label]):
            yield {"columns": {"label": label, "text": pair[0], "text_pair": pair[1]}}
        yield {"columns": {"label": label, "text": text}}
    yield {"format": "text", "columns": {"text": text}}


def looks_like_conll(file: DataFile) -> bool:
    """Return whether a file of another type has a word and its tag per line, and blank lines between sentences."""
    kind, _ = kind_of(file.name)
    if kind in CONLL_KINDS or kind not in TEXT_KINDS:
        return False
    lines = _text(file.beginning(_SAMPLE_BYTES), None).splitlines()[:200]
    widths = {len(line.split()) for line in lines[:-1] if line.strip() and not line.startswith(("#", "-DOCSTART-"))}
    has_tags = any(line.split()[-1] == "O" for line in lines if line.strip())
    return len(widths) == 1 and widths.pop() > 1 and has_tags
