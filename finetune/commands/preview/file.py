"""`finetune preview FILE`: the contents of data files, what their rows mean, and the lines of a job that reads them."""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.commands.printing import print_facts
from finetune.config.paths import is_url
from finetune.config.section import DELIMITED_KINDS, TEXT_KINDS
from finetune.config.sections.data import TrainingSourceSection
from finetune.config.sections.model import ModelSection, TokenizerSection
from finetune.data.formats.columns import DELIMITERS, quoted_list
from finetune.data.formats.layouts import JobKeys, MatchedLayout, describe_unused, is_prose, recognize_all
from finetune.data.rows import ARGUMENTS, RawRow, Row, record_paths, shortened
from finetune.data.sources.files import DataFile, Files, kind_of
from finetune.data.sources.source import Source, find_origin, open_source, texts_of
from finetune.data.templates.rendering import render_chat
from finetune.errors import DataError, FinetuneError, UserError
from finetune.migration.draft import yaml_value
from finetune.model.processing import load_tokenizer
from finetune.registry.formats import FORMATS
from finetune.registry.tasks import TASKS
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
_KEY = "data.train"
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


Keys = dict[str, Any]
"""The keys of a data source in a job."""


@dataclass(frozen=True)
class FileContents:
    """The rows of files, and the ways in which a job can read them."""

    keys: Keys  # of the source, without the keys of a reading
    rows: Sequence[Row]  # the first
    layout: MatchedLayout | None = None  # of the rows, if it is in the table
    readings: Sequence[JobKeys] = ()  # the first is the most likely
    source: Source | None = None  # as the first reading reads it; None if there is none, or it cannot read the rows
    error: DataError | None = None  # the reason why the first reading cannot read the rows


def preview_file(path: str, *, num_rows: int, tokenizer: str | None) -> None:
    """Print columns, first rows, meaning and lengths of the files, and the lines of a job that reads them.

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
    contents = look_into(path, num_rows=num_rows)
    if contents.source is None:
        print(_without_reading(contents))
        return
    lengths: list[int] = []
    rows = contents.source.rows()
    failure: DataError | None = None
    try:
        for raw in islice(rows, MAX_ROWS):
            lengths.append(_length(contents.source, raw, counter))
        stopped = "" if next(rows, None) is None else ", the rest was not read"
    except DataError as error:  # of the first row that cannot be read
        failure, stopped = error, ", up to one that cannot be read"
    print_facts(_facts_of_rows(contents, lengths, counter, stopped=stopped))
    longest = max(lengths, default=0) if counter is not None else None
    print("\n" + job_lines(contents, longest=longest))
    if failure is not None:
        raise failure


def look_into(path: str, *, num_rows: int, task: str | None = None) -> FileContents:
    """Print columns and first rows of the files, and return what they hold.

    With a task, only readings of the formats that it reads count.
    """
    address = path if is_url(path) else str(Path(path).expanduser().absolute())
    origin = find_origin(TrainingSourceSection(path=address), key=_KEY, log=print)
    keys: Keys = {"path": address}
    kind, files = "", f"{origin.name}: a folder of images with one subfolder per class"
    if isinstance(origin, Files):
        shards: Sequence[DataFile] = origin.shards()
        keys |= guess_keys(shards[0])
        names = ", ".join(shard.name for shard in shards[:3]) + (", ..." if len(shards) > 3 else "")
        kind, files = origin.kind, f"{len(shards):,} of kind {origin.kind}: {names}"
    guessed = [(name, f"{format_json(keys[name])}, guessed: {why}") for name, why in _REASONS.items() if name in keys]
    print_facts([("files", files), *guessed])
    rows = _first_rows(keys, max(num_rows, _GUESSED_ROWS))
    contents = _with_reading(keys, rows, kind=kind, task=task)
    _print_rows(contents, num_rows)
    return contents


def _with_reading(keys: Keys, rows: Sequence[Row], *, kind: str, task: str | None) -> FileContents:
    """Return the contents with the first layout whose reading reads the rows; else with the first that fits."""
    unread: FileContents | None = None
    for layout in recognize_all(rows):
        fitting = [each for each in layout.readings() if task is None or each.format in TASKS[task].formats]
        readings = sorted(fitting, key=lambda reading: reading.task != (task or reading.task))
        if layout.entry.remedy and task is None:
            return FileContents(keys, rows, layout)
        if readings:
            contents = _opened(FileContents(keys, rows, layout, readings))
            if contents.source is not None:
                return contents
            unread = unread or contents
    for columns, form in guess_positions(rows, kind=kind):
        reading = JobKeys({"format": form, "columns": columns}, FORMATS[form].usual_task)
        contents = _opened(FileContents(keys, rows, None, [reading]))
        if contents.source is not None and (task is None or form in TASKS[task].formats):
            return contents
    return unread or FileContents(keys, rows)


def _opened(contents: FileContents) -> FileContents:
    """Return the contents with the source that the first reading reads, or the reason why it cannot."""
    section = TrainingSourceSection(**contents.keys, **contents.readings[0].source)
    try:
        source = open_source(section, key=_KEY, log=no_op)
        for raw in islice(source.rows(), _GUESSED_ROWS):
            source.format.read(raw)
    except DataError as error:
        return replace(contents, error=error)
    return replace(contents, source=source)


def job_lines(contents: FileContents, *, longest: int | None) -> str:
    """Return the lines of a job that reads the rows; `longest` is in tokens, None without a tokenizer.

    Other readings follow as comments.
    """
    first, *others = contents.readings
    lines = ["Add to the job:", "", *_lines_of(contents.keys, first, longest=longest)]
    for reading in others:
        purpose = f"{reading.why} (`{reading.task}`)" if reading.why else f"`{reading.task}`"
        lines += ["", f"# or, {purpose}:"]
        lines += [f"# {line}" for line in _lines_of(contents.keys, reading, longest=longest)]
    return "\n".join(lines)


def _lines_of(keys: Keys, reading: JobKeys, *, longest: int | None) -> Iterator[str]:
    yield "data:"
    yield "  train:"
    written = {"path": keys["path"], "format": reading.format, **keys, **reading.source}
    for name, value in written.items():
        if name == "template":
            yield "    template:"
            yield from (f"      {column}: {_quoted(text)}" for column, text in value.items())
        else:
            yield f"    {name}: {yaml_value(value)}"
    yield from (f"  {name}: {yaml_value(value)}" for name, value in reading.data.items())
    known = None if longest is None else next((length for length in _LENGTHS if length >= longest), longest)
    if TASKS[reading.task].has_tokens:
        if known is None:
            yield "  max_length: 512  # `--tokenizer NAME` counts the tokens of each row"
        else:
            yield f"  max_length: {known}  # the longest row has {longest:,} tokens"
    why = f"  # {reading.why}" if reading.why else ""
    yield f"task: {yaml_value(reading.task_keys)}{why}"


def _first_rows(keys: Keys, max_rows: int) -> list[Row]:
    origin = find_origin(TrainingSourceSection(**keys), key=_KEY, log=no_op)
    raws = (raw for shard in origin.shards() for raw in shard.rows())
    rows = [raw.parse() for raw in islice(raws, max_rows)]
    if not rows:
        raise DataError(f"{origin.name} has no rows.")
    return rows


def _print_rows(contents: FileContents, num_rows: int) -> None:
    reads = contents.readings[0].source if contents.source is not None else {}
    section = TrainingSourceSection(**contents.keys, **reads)
    rows = _first_rows({**contents.keys, **reads}, num_rows)
    header = "no header (guessed: the first line looks like a row); by position " if section.has_positions else ""
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


def _length(source: Source, raw: RawRow, tokenizer: Any) -> int:
    """Return the length of the row's longest sequence, in tokens or without a tokenizer in characters.

    Conversations are rendered if the tokenizer has a chat template; one that it refuses counts without it.
    """
    row = source.format.read(raw)
    prompt = list(row.get("prompt", ()))
    chats = [[*prompt, *row[name]] for name in ("messages", "chosen", "rejected", "completion") if name in row]
    sequences = [list(texts_of({"messages": chat})) for chat in chats] or [list(texts_of(row))]
    if "anchor" in row:
        sequences = [[text] for text in sequences[0]]
    if tokenizer is None:
        return max(sum(map(len, texts)) for texts in sequences)
    if tokenizer.chat_template and chats:
        try:
            tools, arguments = row.get("tools"), row.get(ARGUMENTS)
            sequences = [[render_chat(tokenizer, chat, tools=tools, arguments=arguments).text] for chat in chats]
        except DataError:
            pass
    return max(
        sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts) for texts in sequences
    )


def _facts_of_rows(
    contents: FileContents, lengths: list[int], tokenizer: Any, *, stopped: str
) -> Iterator[tuple[str, str]]:
    """Yield what the rows are; `lengths` are in tokens, or in characters without a tokenizer."""
    form = contents.readings[0].format
    if contents.layout is not None:
        yield "each row", contents.layout.entry.description
        yield from (("not read", line) for line in describe_unused(contents.layout))
    yield "format", f"`{form}`: {quoted_list(FORMATS[form].required)}"
    yield "rows", f"{len(lengths):,}{stopped}"
    if lengths and form != "image_label":
        lengths = sorted(lengths)
        quantiles = (
            f"{name} {lengths[math.ceil(share * len(lengths)) - 1]:,}"
            for name, share in (("median", 0.5), ("99%", 0.99))
        )
        unit = "characters" if tokenizer is None else "tokens"
        has_template = tokenizer is not None and tokenizer.chat_template and TASKS[FORMATS[form].usual_task].is_chat
        template = ", with the chat template" if has_template else ""
        yield unit, f"{', '.join(quantiles)}, longest {lengths[-1]:,}, total {sum(lengths):,}{template}"


def _without_reading(contents: FileContents) -> str:
    """Return what rows are that no format can read as they are, and what to do."""
    keys, row, layout = contents.keys, contents.rows[0], contents.layout
    block = "\n".join(f"    {name}: {yaml_value(value)}" for name, value in keys.items())
    if contents.error is not None and layout is not None:
        lines = "\n".join(_lines_of(keys, contents.readings[0], longest=None))
        return (
            f"Each row looks like {layout.entry.description}, but the lines for that cannot read all of them:\n"
            f"{contents.error}\n\n{lines}"
        )
    if layout is not None:
        return f"Each row is {layout.entry.description}. {layout.entry.remedy}"
    formats = "\n".join(f"  {form.name}: {quoted_list(form.required)}" for form in FORMATS)
    return (
        f"No format has the columns {quoted_list(row)}. Map the columns with `columns`, or build them "
        "with a `template`:\n\n"
        f"data:\n  train:\n{block}\n    format: FORMAT\n    columns: {{COLUMN OF THE FORMAT: YOURS}}\n\n"
        f"Formats and their columns:\n{formats}"
    )


def _quoted(text: str) -> str:
    """Return a template in single quotes, in which nothing else needs an escape; with line breaks, as JSON."""
    return f"'{text.replace(chr(39), chr(39) * 2)}'" if text.isprintable() else format_json(text)


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
    readable = content[: content.rfind(b"\n") + 1] or content
    text = readable.decode("utf-8", "replace")
    if "\ufffd" not in text or any(not character.isascii() and character != "\ufffd" for character in text):
        return None  # UTF-8, or damaged UTF-8, which reading reports
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
    names = [str(name) for name in rows[0]]
    is_repeated = any(str(row[name]) == name for row in rows for name in row)
    is_row = is_repeated or any(_is_number(name) or len(name) > _NAME_LENGTH or name.count(" ") > 3 for name in names)
    if kind not in DELIMITED_KINDS or not is_row:  # its names look like names, as in most files
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
