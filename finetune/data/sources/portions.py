"""What a source takes of an origin: the rows between `skip` and `take`, and of them one side of a split."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from finetune.config.sections.data import SourceSection
from finetune.data.formats.row_format import RowFormat
from finetune.data.rows import RawRow
from finetune.data.sources.origin import Origin, OriginShard
from finetune.data.sources.referenced import referenced_digest
from finetune.data.sources.splits import ContentOf, Exclusion, Split, Spot


@dataclass(frozen=True)
class Shard:
    """The rows that a source takes of one file, or of one shard of a hub dataset."""

    portion: "Portion"
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
        if not self.portion.keeps_all:
            return None
        return max(0, self.whole.num_rows(sys.maxsize if self.stop is None else self.stop) - self.first)

    @property
    def num_left_out(self) -> int:
        """Return how many rows of the source have been passed over by now because they are evaluated on."""
        return self.portion.exclusion.num_left_out if self.portion.exclusion else 0

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows but for the first `start` of them, which are passed over as cheaply as the file allows."""
        if self.portion.keeps_all:
            first = self.first + start
            yield from islice(self.whole.rows(first), None if self.stop is None else max(0, self.stop - first))
        else:
            yield from islice(self._kept(), start, None)

    def _kept(self) -> Iterator[RawRow]:
        rows = islice(self.whole.rows(self.first), None if self.stop is None else self.stop - self.first)
        for place, raw in enumerate(rows, start=self.first):
            content = ContentOf(raw, self.portion.format)
            if self.portion.keeps(Spot(self.number, place), content):
                yield raw if not self.portion.is_held_out else RawRow(raw.origin, raw.number, content.row)


@dataclass(frozen=True)
class Portion:
    """A part of an origin. Rows that are held out are delivered as their format reads them."""

    section: SourceSection
    origin: Origin
    format: RowFormat
    split: Split | None = None
    is_held_out: bool = False
    exclusion: Exclusion | None = None

    @property
    def keeps_all(self) -> bool:
        """Tell whether every row between `skip` and `take` belongs to it."""
        return self.split is None and self.exclusion is None

    def keeps(self, spot: Spot, content: ContentOf) -> bool:
        """Tell whether the row belongs to it; one that is left out because it is evaluated on, too, is counted."""
        if self.split is not None and self.split.holds_out(spot, content) != self.is_held_out:
            return False
        return self.exclusion is None or not self.exclusion.leaves_out(content)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
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
        return {
            "rows": [self.section.skip, self.section.take],
            "format": self.format.identity(),
            "split": self.split and [self.split.identity(), "held out" if self.is_held_out else "kept"],
            "excluded": self.exclusion and self.exclusion.contents.identity,
        }

    def _cut(self, wholes: Sequence[OriginShard]) -> Iterator[Shard]:
        skip, take = self.section.skip, self.section.take
        for number, whole in enumerate(wholes):
            needed = None if take is None else skip + take
            if needed == 0:
                return
            is_last = number == len(wholes) - 1
            if is_last or (skip == 0 and take is None):
                yield Shard(self, number, whole, skip, needed)
                skip = 0
                continue
            found = whole.num_rows(at_most=skip + 1 if needed is None else needed)
            if found > skip:
                yield Shard(self, number, whole, skip, needed)
            if take is not None:
                take -= max(0, found - skip)
            skip = max(0, skip - found)
