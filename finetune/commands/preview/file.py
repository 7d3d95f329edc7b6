"""`finetune preview FILE`: what is in files of rows, how they would be read, and the lines of a job that do so."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.commands.preview.guess import Keys, guess_columns, guess_keys, looks_like_conll, nested_records
from finetune.commands.printing import print_facts
from finetune.config.paths import is_url
from finetune.config.sections.data import TrainingSourceSection
from finetune.config.sections.model import ModelSection, TokenizerSection
from finetune.data.formats.columns import quoted_list
from finetune.data.rows import RawRow, Row, shortened
from finetune.data.sources.files import DataFile, Files, Origin, kind_of
from finetune.data.sources.source import Source, find_origin, open_source, texts_of
from finetune.errors import DataError, FinetuneError, UserError
from finetune.model.tokenizer import load_tokenizer
from finetune.registry.formats import FORMATS
from finetune.runtime.optional import no_op
from finetune.runtime.text.library_output import quiet_libraries
from finetune.runtime.text.terminal import format_json

MAX_ROWS = 100_000
"""Rows that are read to the end of their texts: more would take minutes."""

_GUESSED_ROWS = 50
_SHOWN_CHARACTERS = 300
_KEY = "data.train"
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class ReadRows:
    """What reading the rows to their end, or to MAX_ROWS, has found."""

    num_rows: int
    is_all: bool
    lengths: Sequence[int]  # of every row, in tokens, or in characters where there is no tokenizer
    error: DataError | None  # at the first row that cannot be read


def preview_file(path: str, *, num_rows: int, tokenizer: str | None) -> None:
    """Print columns, first rows, format and lengths of the files, and the lines of a job that read them.

    Raises DataError naming file and line of what cannot be read, after what could be has been printed.
    """
    quiet_libraries(is_main=True)
    counter = None if tokenizer is None else _load_tokenizer(tokenizer)
    place = path if is_url(path) else str(Path(path).expanduser().absolute())
    origin = find_origin(_section({"path": place}), key=_KEY, log=print)
    keys: Keys = {"path": place, **_keys_of(origin)}
    print_facts([("files", _describe_files(origin)), *_facts_of_keys(keys)])
    rows = _first_rows(keys, max(num_rows, _GUESSED_ROWS))
    source, keys = _best_format(keys, rows, kind=_kind(origin))
    _print_rows(keys, num_rows)
    if source is None:
        print(_no_format(keys, rows[0]))
        return
    form = str(source.format.identity()[0])
    read = _read(source, counter)
    print_facts(_facts_of_rows(read, form, is_tokens=counter is not None))
    print("\n" + job_lines(keys, form, longest=max(read.lengths, default=0) if counter is not None else None))
    if read.error is not None:
        raise read.error


def job_lines(keys: Keys, form: str, *, longest: int | None) -> str:
    """Return the lines of a job that read the rows; `longest` is in tokens, None where there is no tokenizer."""
    names = ["path", "format", *(name for name in keys if name not in ("path", "format"))]
    written = {**keys, "format": form}
    lines = [f"    {name}: {_yaml(written[name])}" for name in names if written.get(name) not in (None, {})]
    known = None if longest is None else next((each for each in _LENGTHS if each >= longest), longest)
    if form == "image_label":
        length = []
    elif known is None:
        length = ["  max_length: 512  # `--tokenizer NAME` counts the tokens of each row"]
    else:
        length = [f"  max_length: {known}  # the longest row has {longest:,} tokens, without a chat template"]
    task = f"task: {{name: {FORMATS[form].usual_task}}}  # one that reads this format"
    return "\n".join(["Write in a job:", "", "data:", "  train:", *lines, *length, task])


def _section(keys: Keys) -> TrainingSourceSection:
    return TrainingSourceSection(**keys)


def _load_tokenizer(name: str) -> Any:
    section = ModelSection(tokenizer=TokenizerSection(name=name))
    try:
        return load_tokenizer(section, texts=list, cache_folder=Path(), log=no_op)
    except FinetuneError as error:
        raise UserError(f"--tokenizer: {error}") from error


def _keys_of(origin: Origin) -> Keys:
    if not isinstance(origin, Files):
        return {}
    first = origin.shards()[0]
    keys = guess_keys(first)
    if looks_like_conll(first):
        ending = kind_of(first.name)[0]
        print(f"{first.name} looks like a CoNLL file: rename it from {ending} to .conll to read words and tags")
    return keys


def _kind(origin: Origin) -> str:
    return origin.kind if isinstance(origin, Files) else ""


def _describe_files(origin: Origin) -> str:
    if not isinstance(origin, Files):
        return f"{origin.name}: a folder of images, its sub-folders are the classes"
    shards: Sequence[DataFile] = origin.shards()
    names = ", ".join(shard.name for shard in shards[:3]) + (", ..." if len(shards) > 3 else "")
    return f"{len(shards):,} of kind {origin.kind}: {names}"


def _facts_of_keys(keys: Keys) -> Iterator[tuple[str, str]]:
    why = {
        "encoding": "it is not UTF-8",
        "delimiter": "it cuts all lines into the same number of columns",
        "records": "the file is one object, and this is a list of objects in it",
    }
    for name, reason in why.items():
        if name in keys:
            yield name, f"{format_json(keys[name])}, guessed: {reason}"


def _first_rows(keys: Keys, most: int) -> list[Row]:
    origin = find_origin(_section(keys), key=_KEY, log=no_op)
    raws = (raw for shard in origin.shards() for raw in shard.rows())
    rows = [raw.parse() for raw in islice(raws, most)]
    if not rows:
        raise DataError(f"{origin.name} has no rows.")
    return rows


def _best_format(keys: Keys, rows: Sequence[Row], *, kind: str) -> tuple[Source | None, Keys]:
    """Return the rows as the first format reads them that fits, and the keys of the job that say so."""
    for guess in guess_columns(rows, kind=kind):
        tried = {**keys, **guess}
        try:
            source = open_source(_section(tried), key=_KEY, log=no_op)
            for raw in islice(source.rows(), _GUESSED_ROWS):
                source.format.read(raw)
        except DataError:
            continue
        return source, tried
    return None, keys


def _print_rows(keys: Keys, num_rows: int) -> None:
    rows = _first_rows(keys, num_rows)
    is_by_position = _section(keys).has_positions
    header = "no header, guessed: its first line looks like a row; by position " if is_by_position else ""
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
    stopped = "" if read.error is None else ", until one that cannot be read"
    yield "rows", f"{read.num_rows:,}" + (stopped or ("" if read.is_all else ": more were not read"))
    if read.lengths and form != "image_label":
        lengths = sorted(read.lengths)
        quantiles = (f"{name} {_quantile(lengths, share):,}" for name, share in (("half", 0.5), ("99%", 0.99)))
        unit = "tokens" if is_tokens else "characters"
        yield unit, f"{', '.join(quantiles)}, longest {lengths[-1]:,}, all {sum(lengths):,}"


def _quantile(lengths: Sequence[int], share: float) -> int:
    return lengths[min(len(lengths) - 1, math.ceil(share * len(lengths)) - 1)]


def _no_format(keys: Keys, row: Row) -> str:
    formats = "\n".join(f"  {form.name}: {quoted_list(form.required)}" for form in FORMATS)
    block = "\n".join(f"    {name}: {_yaml(value)}" for name, value in keys.items())
    inner = nested_records(row)
    place = ".".join([keys["records"], *inner]) if "records" in keys and inner else None
    deeper = f"`records: {place}` makes rows of the lists in each.\n" if place is not None else ""
    return (
        f"{deeper}No format has the columns {quoted_list(row)}. Map them with `columns`, or make them with a "
        "`template`:\n\n"
        f"data:\n  train:\n{block}\n    format: FORMAT\n    columns: {{COLUMN OF THE FORMAT: YOURS}}\n\n"
        f"Formats and their columns:\n{formats}"
    )


def _yaml(value: Any) -> str:
    """Return a value as YAML in one line: JSON, without quotes where none are needed."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_yaml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/~.][\w./~-]*", value) and not _is_word(value):
        return value
    return format_json(value)


def _is_word(text: str) -> bool:
    """Return whether YAML reads the text as something else than text."""
    return text.lower() in ("true", "false", "null", "yes", "no", "on", "off", "~", ".nan", ".inf")
