"""What a source takes of an origin: the rows between `skip` and `take`, and of them one side of a split.

Rows are held out to evaluate on, or excluded from training because they are among those. Files that rows refer to,
such as images, belong to the content.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from finetune.config.sections.data import SourceSection
from finetune.data.formats.row_format import RowFormat
from finetune.data.images.stored_image import StoredImage
from finetune.data.rows import RawRow, Row
from finetune.data.sources.files import Files, Origin, OriginShard
from finetune.data.sources.local import ImageFolder
from finetune.errors import DataError
from finetune.runtime.files.digests import files_digest

_DIGEST_BYTES = 16


class RowPosition(NamedTuple):
    """Where a row stands in its origin, whatever is skipped: shard and row in it, both from 0."""

    shard: int
    place: int


class RowContent:
    """What a row says, read once and only when somebody asks."""

    def __init__(self, raw: RawRow, form: RowFormat) -> None:
        self._raw = raw
        self._format = form

    @cached_property
    def row(self) -> Row:
        """Return the row as its format reads it; raises DataError naming what is wrong with it."""
        return self._format.read(self._raw)

    @cached_property
    def digest(self) -> bytes:
        """Return a digest that rows have in common exactly when their format reads the same from them."""
        return content_digest(self.row)


class Split(Protocol):
    """A rule that holds a share of the rows out of training."""

    def holds_out(self, spot: RowPosition, content: RowContent) -> bool:
        """Return whether the row is held out for evaluation."""

    def identity(self) -> Any:
        """Return, as JSON can hold it, what decides which rows these are."""


class PositionSplit(NamedTuple):
    """About `share` of the rows, drawn by seed and place in the file: no row needs to know of another."""

    share: float
    seed: int

    def holds_out(self, spot: RowPosition, content: RowContent) -> bool:
        """Return whether the lot falls on this place."""
        return _uniform(f"{self.seed} {spot.shard} {spot.place}".encode()) < self.share

    def identity(self) -> Any:
        """Return the share and the seed."""
        return ["place", self.share, self.seed]


class ContentSplit(NamedTuple):
    """About `share` of the rows, drawn by what they say: equal rows are never on both sides."""

    share: float

    def holds_out(self, spot: RowPosition, content: RowContent) -> bool:
        """Return whether the lot falls on rows that say this."""
        return _uniform(content.digest) < self.share

    def identity(self) -> Any:
        """Return the share."""
        return ["content", self.share]


@dataclass(frozen=True)
class ValidationContents:
    """What the validation rows say, read when it is first asked for."""

    rows: Callable[[], Iterator[Row]]
    identity: Mapping[str, Any]  # what decides which rows these are

    @cached_property
    def digests(self) -> frozenset[bytes]:
        """Return the digests of all of them."""
        return frozenset(content_digest(row) for row in self.rows())


class Exclusion:
    """Leaves the rows of one source out that say what a validation row says, and counts them."""

    def __init__(self, contents: ValidationContents) -> None:
        self.contents = contents
        self.num_left_out = 0

    def leaves_out(self, content: RowContent) -> bool:
        """Return whether the row is among the validation rows."""
        is_among = content.digest in self.contents.digests
        self.num_left_out += is_among
        return is_among


def content_digest(row: Row) -> bytes:
    """Return a digest of a row as its format reads it; the order of an object's keys does not matter."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=_content)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _content(value: Any) -> str:
    """Return what JSON cannot hold as text: of an image its digest, wherever it lies."""
    return value.digest() if isinstance(value, StoredImage) else str(value)


def _uniform(drawn_by: bytes) -> float:
    """Return a number from 0 up to 1, as good as random, that these bytes always draw."""
    drawn = hashlib.blake2b(drawn_by, digest_size=8, person=b"finetune split").digest()
    return int.from_bytes(drawn, "big") / 2**64


def referenced_digest(origin: Origin, form: RowFormat) -> str | None:
    """Return a digest of the files that the rows refer to; None where the first row refers to none.

    A folder of images is known by them already. Raises DataError for a file that cannot be read.
    """
    if isinstance(origin, ImageFolder):
        return None
    files = (_files_of(raw, form) for shard in origin.shards() for raw in shard.rows())
    first = next(files, [])
    if not first:
        return None
    try:
        return files_digest([*first, *chain.from_iterable(files)])
    except OSError as error:
        raise DataError(f"a row refers to {error.filename}, which cannot be read: {error.strerror}.") from error


def _files_of(raw: RawRow, form: RowFormat) -> list[Path]:
    row = form.read(raw)
    try:
        return list(referenced_files(row))
    except DataError as error:
        raise DataError(f"{raw.place}: {error}") from error


def referenced_files(row: Row) -> Iterator[Path]:
    """Yield the files that the row refers to, in its order; raises DataError for one that may not be read."""
    for value in row.values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, StoredImage) and each.path is not None:
                yield each.file()


@dataclass(frozen=True)
class SliceShard:
    """The rows that a source takes of one file, or of one shard of a hub dataset."""

    source_slice: "SourceSlice"
    number: int  # of the shard in its origin
    whole: OriginShard
    first: int
    stop: int | None

    @property
    def name(self) -> str:
        """Return what the file or shard is called in messages."""
        return self.whole.name

    def num_rows(self) -> int | None:
        """Return how many rows it has, as far as that is known without parsing them."""
        if not self.source_slice.keeps_all:
            return None
        return max(0, self.whole.num_rows(sys.maxsize if self.stop is None else self.stop) - self.first)

    @property
    def num_left_out(self) -> int:
        """Return how many rows of the source have been passed over by now because they are evaluated on."""
        return self.source_slice.exclusion.num_left_out if self.source_slice.exclusion else 0

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows but for the first `start` of them, which are passed over as cheaply as the file allows."""
        if self.source_slice.keeps_all:
            first = self.first + start
            yield from islice(self.whole.rows(first), None if self.stop is None else max(0, self.stop - first))
        else:
            yield from islice(self._selected(), start, None)

    def _selected(self) -> Iterator[RawRow]:
        rows = islice(self.whole.rows(self.first), None if self.stop is None else self.stop - self.first)
        for place, raw in enumerate(rows, start=self.first):
            content = RowContent(raw, self.source_slice.format)
            if self.source_slice.keeps(RowPosition(self.number, place), content):
                yield raw if not self.source_slice.is_held_out else RawRow(raw.origin, raw.number, content.row)


@dataclass(frozen=True)
class SourceSlice:
    """A part of an origin. Rows that are held out are delivered as their format reads them."""

    section: SourceSection
    origin: Origin
    format: RowFormat
    split: Split | None = None
    is_held_out: bool = False
    exclusion: Exclusion | None = None

    @property
    def keeps_all(self) -> bool:
        """Return whether every row between `skip` and `take` belongs to it."""
        return self.split is None and self.exclusion is None

    def keeps(self, spot: RowPosition, content: RowContent) -> bool:
        """Return whether the row belongs to it; one that is left out because it is evaluated on, too, is counted."""
        if self.split is not None and self.split.holds_out(spot, content) != self.is_held_out:
            return False
        return self.exclusion is None or not self.exclusion.leaves_out(content)

    @cached_property
    def shards(self) -> tuple[SliceShard, ...]:
        """Return the shards that have rows between `skip` and `take`; rows are counted only as far as that needs."""
        return tuple(self._cut(self.origin.shards()))

    def identity(self) -> Mapping[str, Any]:
        """Return what decides the rows and how they are read, their content as a digest."""
        referenced = referenced_digest(self.origin, self.format)
        files = {} if referenced is None else {"referenced": referenced}
        return {"content": self.origin.digest(), **files, **self._choice()}

    def listing_identity(self) -> Mapping[str, Any]:
        """Return the same without reading the content: names, sizes and times or tags of the files instead."""
        return {"listing": self.origin.listing(), **self._choice()}

    def _choice(self) -> Mapping[str, Any]:
        options = self.origin.options.identity() if isinstance(self.origin, Files) else {}
        return {
            "rows": [self.section.skip, self.section.take],
            "format": self.format.identity(),
            "split": self.split and [self.split.identity(), "held out" if self.is_held_out else "kept"],
            "excluded": self.exclusion and self.exclusion.contents.identity,
            **({"read": options} if options else {}),
        }

    def _cut(self, wholes: Sequence[OriginShard]) -> Iterator[SliceShard]:
        skip, take = self.section.skip, self.section.take
        for number, whole in enumerate(wholes):
            needed = None if take is None else skip + take
            if needed == 0:
                return
            is_last = number == len(wholes) - 1
            if is_last or (skip == 0 and take is None):
                yield SliceShard(self, number, whole, skip, needed)
                skip = 0
                continue
            found = whole.num_rows(at_most=skip + 1 if needed is None else needed)
            if found > skip:
                yield SliceShard(self, number, whole, skip, needed)
            if take is not None:
                take -= max(0, found - skip)
            skip = max(0, skip - found)
