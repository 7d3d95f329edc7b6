"""The sources of a job: training rows, validation rows, and how they are separated."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from finetune.config.sections.data import (
    DataSection,
    SourceSection,
    StreamSection,
    TrainedSourceSection,
    ValidationSourceSection,
)
from finetune.data.formats.columns import require_column_positions
from finetune.data.formats.row_format import ALREADY_READ, RowFormat, choose_format
from finetune.data.images import ImageRoot
from finetune.data.rows import RawRow, Row, describe, require_shallow
from finetune.data.sources.files import Files, Origin, kind_of
from finetune.data.sources.local import find_local, find_remote, load_hub_dataset
from finetune.data.sources.readers import read_options
from finetune.data.sources.slices import Exclusion, SliceShard, SourceSlice, Split, ValidationContents
from finetune.errors import DataError
from finetune.registry.formats import SOURCES


@dataclass(frozen=True)
class PluginRows(Origin):
    """All rows of a plugin's source, which is called again for each pass; they hold images or absolute paths."""

    source: str  # its name in the registry

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows without the first `start`; raises DataError where the plugin fails, or returns no row."""
        try:
            for number, row in enumerate(islice(SOURCES.resolve(self.source)(), start, None), start + 1):
                if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
                    raise DataError(
                        f"{self.name}, row {number}: a row is a dictionary of columns, not {describe(row)}."
                    )
                _require_plain(row, location=f"{self.name}, row {number}")
                yield RawRow(self.name, number, row)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.name} failed: {type(error).__name__}: {error}") from error

    @cached_property
    def digest(self) -> str:
        """Return a digest of all rows."""
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(json.dumps(row.content, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def listing(self) -> Any:
        """Return the source with the digest of its rows: only reading them shows whether they have changed."""
        return [self.source, self.digest]


def _require_plain(row: Row, *, location: str) -> None:
    """Raise DataError for a row that is nested too deeply, or that has an array or a tensor in it."""
    try:
        require_shallow(row)
    except DataError as error:
        raise DataError(f"{location} {error}") from error
    values = list(row.items())
    while values:
        column, value = values.pop()
        if isinstance(value, Mapping):
            values += [(column, inner) for inner in value.values()]
        elif isinstance(value, list | tuple):
            values += [(column, inner) for inner in value]
        elif hasattr(value, "__array__") and not type(value).__module__.startswith("PIL."):
            name = f"{type(value).__module__}.{type(value).__name__}"
            raise DataError(f"{location}, `{column}` has a `{name}`. Rows are JSON values: write `value.tolist()`.")


Log = Callable[[str], None]

EXCERPT_ROWS, EXCERPT_SHARDS = 50_000, 16
"""The rows and shards of a stream that a tokenizer is trained on."""


@dataclass(eq=False)
class Source:
    """The rows of one source section of the job YAML, and the format that reads them."""

    section: SourceSection
    slices: Sequence[SourceSlice]
    key: str  # of the section in the job YAML (`data.train`, `data.train.mix.0`, `data.validation`)
    format: RowFormat
    log: Log
    num_left_out: int = 0  # rows excluded by validation rows in the last complete pass of `rows`

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows in order."""
        exclusions = [each_slice.exclusion for each_slice in self.slices if each_slice.exclusion is not None]
        before = sum(exclusion.num_left_out for exclusion in exclusions)
        yield from chain.from_iterable(shard.rows() for shard in self.shards())
        self.num_left_out = sum(exclusion.num_left_out for exclusion in exclusions) - before

    def num_rows(self) -> int | None:
        """Return the number of rows, or None if rows must be parsed to know it; reads all files once."""
        counts = [shard.num_rows() for shard in self.shards()]
        known = [number for number in counts if number is not None]
        return sum(known) if len(known) == len(counts) else None

    def shards(self) -> tuple[SliceShard, ...]:
        """Return the parts that can be read independently, in the order of `rows`."""
        return tuple(chain.from_iterable(each_slice.shards for each_slice in self.slices))

    def excerpt(self) -> Iterator[RawRow]:
        """Yield the rows that a tokenizer is trained on: all, or an excerpt of a stream, which is logged."""
        if stream_of(self.section) is None:
            yield from self.rows()
            return
        self.log(
            f"{self.key}: since it is a stream, the tokenizer is trained on at most {EXCERPT_ROWS:,} rows, from the "
            f"start of at most {EXCERPT_SHARDS} of its files"
        )
        shards = self.shards()
        num_chosen = min(EXCERPT_SHARDS, len(shards))
        for number in range(num_chosen):  # the same number of rows of evenly spaced shards
            yield from islice(shards[number * len(shards) // num_chosen].rows(), EXCERPT_ROWS // num_chosen)

    def identity(self, *, reads_content: bool = True) -> Mapping[str, Any]:
        """Return JSON values that determine the rows and how they are read; reads all local files once.

        Without `reads_content`, they are names, sizes, and times or tags instead of digests.
        """
        parts = [each_slice.identity(reads_content=reads_content) for each_slice in self.slices]
        return parts[0] if len(parts) == 1 else {"parts": parts}


@dataclass(frozen=True)
class OpenedSources:
    """The sources of a job."""

    train: tuple[Source, ...]
    validation: Source | None


def open_sources(section: DataSection, *, seed: int, log: Log) -> OpenedSources:
    """Return the sources of the job; reads the first row of each and logs the detected format.

    Raises DataError if there are no rows, if they cannot be read, or if their format cannot be detected.
    """
    sections: dict[str, SourceSection] = {f"data.train.mix.{n}": each for n, each in enumerate(section.train.mix)}
    sections = sections or {"data.train": section.train}
    slices = {key: _open(each, key=key, log=log) for key, each in sections.items()}
    validation = None
    if section.validation is not None:
        split: Split | None = None
        if section.validation.fraction is not None:
            split = Split(section.validation.fraction, seed)
        elif section.validation.hash_fraction is not None:
            split = Split(section.validation.hash_fraction)
        if split is not None:
            whole, slices = slices, {key: replace(one, split=split) for key, one in slices.items()}
            held_out = [replace(one, is_held_out=True) for one in slices.values()]
            if split.seed is None and not _has_rows(held_out):  # there are few rows
                slices = {key: one.holding_one_out(split) for key, one in whole.items()}
        validation = _validation(section.validation, list(slices.values()), log=log)
        if section.validation.exclude_from_train:
            contents = ValidationContents(
                partial(_contents, validation.shards(), validation.format), validation.identity()
            )
            slices = {key: replace(each_slice, exclusion=Exclusion(contents)) for key, each_slice in slices.items()}
    train = (Source(sections[key], [each], key, each.format, log) for key, each in slices.items())
    return OpenedSources(tuple(train), validation)


def open_source(section: SourceSection, *, key: str, log: Log) -> Source:
    """Return one source that shares no rows with another."""
    each_slice = _open(section, key=key, log=log)
    return Source(section, [each_slice], key, each_slice.format, log)


def stream_of(section: SourceSection) -> StreamSection | None:
    """Return the stream section of the source; None if it is prepared as a whole."""
    return section.stream if isinstance(section, TrainedSourceSection) else None


def texts(sources: Sequence[Source]) -> Iterator[str]:
    """Yield every text of the sources' rows, as read by their formats, to train a tokenizer on."""
    return chain.from_iterable(map(texts_of, rows_read(sources)))


def rows_read(sources: Sequence[Source]) -> Iterator[Row]:
    """Yield every row of the sources, as read by their formats; of a stream an excerpt, which is logged."""
    for source in sources:
        for raw in source.excerpt():
            yield source.format.read(raw)


def _open(section: SourceSection, *, key: str, log: Log) -> SourceSlice:
    origin = find_origin(section, key=key, log=log)
    unread = SourceSlice(section, origin, ALREADY_READ)
    raws = chain.from_iterable(shard.rows() for shard in unread.shards)
    first = next(raws, None)
    if first is None:
        after = f" after skip: {section.skip}" if section.skip else ""
        raise DataError(f"{key}: {origin.name} has no rows{after}.")
    root = image_root(section, origin.image_folders, key=key)
    if section.has_positions:
        require_column_positions(section, first, key=key)
    rows = _first_rows(chain([first], raws))
    form = choose_format(section, first, rows=rows, key=key, log=log, class_names=origin.class_names, image_root=root)
    return replace(unread, format=form)


_LOOKED_AT = 50
"""The number of rows that tell what columns mean."""


def _first_rows(raws: Iterator[RawRow]) -> list[Row]:
    """Return the first rows, up to one that cannot be read; encoding reports that one."""
    rows: list[Row] = []
    with suppress(DataError):
        for raw in islice(raws, _LOOKED_AT):
            rows.append(raw.parse())
    return rows


def image_root(section: SourceSection, folders: Sequence[Path], *, key: str) -> ImageRoot:
    """Return the root folder of the image files that the source's rows may name."""
    if section.image_root is None:
        return ImageRoot(tuple(folders), key, section.follow_links)
    root = Path(section.image_root)
    if not root.is_dir():
        raise DataError(f"{key}.image_root: {root} is not a folder. Name the folder that holds the images.")
    return ImageRoot((root,), key, section.follow_links, counts_from=root)


def find_origin(section: SourceSection, *, key: str, log: Log) -> Origin:
    """Return the origin of the section's rows; raises DataError naming the key if there is none."""
    name = "source" if section.source is not None else "name" if section.path is None else "path"
    origin: Origin
    try:
        if section.source is not None:
            origin = PluginRows(f"the source `{section.source}`", section.source)
        elif section.path is None:
            origin = load_hub_dataset(section)
        else:
            origin = (find_remote if "://" in section.path else find_local)(section, key=key, log=log)
    except DataError as error:
        raise DataError(f"{key}.{name}: {error}") from error
    except OSError as error:
        raise DataError(f"{key}.{name}: {error.filename or section.path} cannot be read: {error.strerror}.") from error
    if isinstance(origin, Files):
        options = read_options(section, {kind_of(file.name)[0] for file in origin.files}, key=key)
        return replace(origin, files=tuple(replace(file, options=options) for file in origin.files))
    what = "a folder of images" if section.path else origin.name if section.source else "a hub dataset"
    read_options(section, [what], key=key)
    return origin


def _validation(section: ValidationSourceSection, train: Sequence[SourceSlice], *, log: Log) -> Source:
    key = "data.validation"
    if train[0].split is None:
        return open_source(section, key=key, log=log)
    held_out = [replace(each_slice, is_held_out=True) for each_slice in train]
    if section.fraction is not None:
        if not any(each_slice.has_two_rows for each_slice in train):
            raise DataError(f"{key}.fraction: there is 1 training row, and a split needs 2. Name validation rows.")
    elif not _has_rows(train):
        raise DataError(f"{key}: all training rows fall into this share. Decrease it.")
    return Source(section, held_out, key, ALREADY_READ, log)


def _has_rows(slices: Sequence[SourceSlice]) -> bool:
    return any(True for each_slice in slices for shard in each_slice.shards for _ in shard.rows())


def _contents(shards: Sequence[SliceShard], form: RowFormat) -> Iterator[Row]:
    return (form.read(raw) for shard in shards for raw in shard.rows())


def texts_of(row: Row) -> Iterator[str]:
    """Yield every text of a row as its format reads it."""
    yield from (row[name] for name in ("text", "text_pair", "anchor", "positive") if name in row)
    yield from row.get("negatives", ())
    if "tokens" in row:
        yield " ".join(row["tokens"])
    turns = chain.from_iterable(row.get(part, ()) for part in ("messages", "prompt", "chosen", "rejected"))
    for turn in turns:
        for content in (turn[name] for name in ("reasoning_content", "thinking", "content") if turn.get(name)):
            yield from [content] if isinstance(content, str) else (part["text"] for part in content if "text" in part)
