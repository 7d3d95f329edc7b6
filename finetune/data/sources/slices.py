"""The part of an origin that belongs to a source: the rows from `skip` to `take`, on one side of a split.

Rows are held out for validation, or excluded from training because validation rows have the same content. Files that
rows refer to, such as images, are part of the content.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from math import nextafter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import NOTES
from finetune.data.formats.row_format import RowFormat
from finetune.data.images import StoredImage
from finetune.data.rows import RawRow, Row
from finetune.data.sources.files import Files, Origin, OriginShard
from finetune.data.sources.local import ImageFolder
from finetune.errors import DataError
from finetune.runtime.files.digests import files_digest

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class RowContent:
    """The content of a row, read lazily and once."""

    raw: RawRow
    format: RowFormat

    @cached_property
    def row(self) -> Row:
        """Return the row as its format reads it; raises DataError for an invalid row."""
        return self.format.read(self.raw)

    @cached_property
    def digest(self) -> bytes:
        """Return a digest that is equal for rows whose format reads the same content."""
        return content_digest(self.row)


class Split(NamedTuple):
    """Holds out the rows with the lowest draws: with a seed an exact count of them, else those below `share`.

    With a seed a row is drawn by its position, without one by its content, so that equal rows are on the same side.
    """

    share: float
    seed: int | None = None

    def draw(self, position: tuple[int, int], content: RowContent) -> float:
        """Return the row's pseudo-random number in [0, 1)."""
        return _draw(content.digest) if self.seed is None else self.draw_position(position)

    def draw_position(self, position: tuple[int, int]) -> float:
        """Return the draw of a position by the seed: the row's shard and its number there, skipped rows included."""
        return _draw(f"{self.seed} {position[0]} {position[1]}".encode())

    def num_held_out(self, num_rows: int) -> int:
        """Return the rounded share of the rows: at least one and fewer than all; none of a single row."""
        return min(max(1, round(self.share * num_rows)), num_rows - 1)

    def identity(self) -> Any:
        """Return JSON values that determine which rows are held out."""
        return ["content", self.share] if self.seed is None else ["count", self.share, self.seed]


def _draw(key: bytes) -> float:
    digest = hashlib.blake2b(key, digest_size=8, person=b"finetune split").digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True)
class ValidationContents:
    """The contents of the validation rows, read lazily."""

    rows: Callable[[], Iterator[Row]]
    identity: Mapping[str, Any]  # JSON values that determine the rows

    @cached_property
    def digests(self) -> frozenset[bytes]:
        """Return the digests of all validation rows."""
        return frozenset(content_digest(row) for row in self.rows())


@dataclass
class Exclusion:
    """Excludes the rows of a source whose content equals a validation row's, and counts them."""

    contents: ValidationContents
    num_left_out: int = 0


def content_digest(row: Row) -> bytes:
    """Return a digest of a row as its format reads it; neither the order of keys nor the paths of images matter."""
    text = json.dumps(
        {name: row[name] for name in row if name != NOTES},
        sort_keys=True,
        ensure_ascii=False,
        default=lambda value: value.digest() if isinstance(value, StoredImage) else str(value),
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def referenced_digest(origin: Origin, form: RowFormat) -> str | None:
    """Return a digest of the files that the rows refer to; None if the first row refers to none.

    A folder of images includes them in its own digest. Raises DataError for a file that cannot be read.
    """
    if isinstance(origin, ImageFolder):
        return None
    files: list[Path] = []
    for raw in chain.from_iterable(shard.rows() for shard in origin.shards()):
        row = form.read(raw)
        try:
            files += [
                item.file()
                for value in row.values()
                for item in (value if isinstance(value, list | tuple) else (value,))
                if isinstance(item, StoredImage) and item.path is not None
            ]
        except DataError as error:
            raise DataError(f"{raw.location}: {error}") from error
        if not files:  # of the first row
            break
    try:
        return files_digest(files) if files else None
    except OSError as error:
        raise DataError(f"a row refers to {error.filename}, which cannot be read: {error.strerror}.") from error


@dataclass(frozen=True)
class SliceShard:
    """The rows of a source in one file, or in one shard of a hub dataset."""

    source_slice: "SourceSlice"
    number: int  # of the shard in its origin
    whole: OriginShard
    first: int
    stop: int | None

    @property
    def name(self) -> str:
        """Return the name of the file or shard for messages."""
        return self.whole.name

    def num_rows(self) -> int | None:
        """Return the number of rows, or None if rows must be parsed to know it."""
        if not self.source_slice.keeps_all:
            return None
        return max(0, self.whole.num_rows(sys.maxsize if self.stop is None else self.stop) - self.first)

    @property
    def num_left_out(self) -> int:
        """Return the number of rows of the source that have been excluded so far by validation rows."""
        return self.source_slice.exclusion.num_left_out if self.source_slice.exclusion else 0

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows without the first `start`, which are skipped as cheaply as the file allows."""
        if self.source_slice.keeps_all:
            first = self.first + start
            yield from islice(self.whole.rows(first), None if self.stop is None else max(0, self.stop - first))
            return
        num_skipped = 0
        for position, raw, content in self.candidates():
            if not self.source_slice.keeps(position, content):
                continue
            if num_skipped < start:
                num_skipped += 1
                continue
            yield raw if not self.source_slice.is_held_out else RawRow(raw.origin, raw.number, content.row)

    def positions(self) -> Iterator[tuple[int, int]]:
        """Return the positions of the rows between `skip` and `take`, on whichever side of a split."""
        stop = self.whole.num_rows(sys.maxsize if self.stop is None else self.stop)
        return ((self.number, row) for row in range(self.first, stop))

    def candidates(self) -> Iterator[tuple[tuple[int, int], RawRow, RowContent]]:
        """Yield the rows between `skip` and `take` with their positions, on whichever side of a split."""
        rows = islice(self.whole.rows(self.first), None if self.stop is None else self.stop - self.first)
        for row, raw in enumerate(rows, start=self.first):
            yield (self.number, row), raw, RowContent(raw, self.source_slice.format)


@dataclass(frozen=True)
class SourceSlice:
    """A part of an origin. Held-out rows are yielded as read by their format."""

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

    def keeps(self, position: tuple[int, int], content: RowContent) -> bool:
        """Return whether the row belongs to it; rows excluded by validation rows are counted."""
        if self.split is not None and (self.split.draw(position, content) < self.threshold) != self.is_held_out:
            return False
        if self.exclusion is None:
            return True
        is_excluded = content.digest in self.exclusion.contents.digests
        self.exclusion.num_left_out += is_excluded
        return not is_excluded

    @property
    def has_two_rows(self) -> bool:
        """Return whether there are two rows or more between `skip` and `take`; reads at most two."""
        candidates = chain.from_iterable(shard.candidates() for shard in self.shards)
        return len(list(islice(candidates, 2))) == 2

    @cached_property
    def threshold(self) -> float:
        """Return the draw below which a row is held out; with a seed, all rows are counted and drawn for it."""
        assert self.split is not None, "without a split, no row is held out"
        if self.split.seed is None:
            return self.split.share
        positions = chain.from_iterable(shard.positions() for shard in self.shards)
        draws = np.fromiter(map(self.split.draw_position, positions), np.float64)
        num_held_out = self.split.num_held_out(len(draws))
        return float(np.partition(draws, num_held_out)[num_held_out])

    def holding_one_out(self, split: Split) -> "SourceSlice":
        """Return the slice with a split that holds out the one row with the lowest draw, which `split` does not."""
        candidates = (row for shard in self.shards for row in shard.candidates())
        lowest = min((split.draw(position, content) for position, _, content in candidates), default=split.share)
        return replace(self, split=split._replace(share=nextafter(lowest, 1.0)))

    @cached_property
    def shards(self) -> tuple[SliceShard, ...]:
        """Return the shards with rows between `skip` and `take`; counts only as many rows as necessary."""
        shards: list[SliceShard] = []
        wholes = self.origin.shards()
        skip, take = self.section.skip, self.section.take
        for number, whole in enumerate(wholes):
            needed = None if take is None else skip + take
            if needed == 0:
                break
            if number == len(wholes) - 1 or (skip == 0 and take is None):
                shards.append(SliceShard(self, number, whole, skip, needed))
                skip = 0
                continue
            num_rows = whole.num_rows(at_most=skip + 1 if needed is None else needed)
            if num_rows > skip:
                shards.append(SliceShard(self, number, whole, skip, needed))
            if take is not None:
                take -= max(0, num_rows - skip)
            skip = max(0, skip - num_rows)
        return tuple(shards)

    def identity(self, *, reads_content: bool) -> Mapping[str, Any]:
        """Return JSON values that determine the rows and how they are read.

        With `reads_content`, a digest of their content is part of it, otherwise names, sizes and times or tags.
        """
        values: dict[str, Any] = {}
        if reads_content:
            values["content"] = self.origin.digest
            if (referenced := referenced_digest(self.origin, self.format)) is not None:
                values["referenced"] = referenced
        else:
            values["listing"] = self.origin.listing()
        values |= {
            "rows": [self.section.skip, self.section.take],
            "format": self.format.identity(),
            "split": self.split and [self.split.identity(), "held out" if self.is_held_out else "kept"],
            "excluded": self.exclusion and self.exclusion.contents.identity,
        }
        if isinstance(self.origin, Files) and (options := self.origin.files[0].options.identity()):
            values["read"] = options
        return values
