"""Splits: which rows are held out to evaluate on, and which are left out of training because they are among those."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from finetune.data.formats.row_format import RowFormat
from finetune.data.images.read import StoredImage
from finetune.data.rows import RawRow, Row

_DIGEST_BYTES = 16


class Spot(NamedTuple):
    """Where a row stands in its origin, whatever is skipped: shard and row in it, both from 0."""

    shard: int
    place: int


class ContentOf:
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

    def holds_out(self, spot: Spot, content: ContentOf) -> bool:
        """Tell whether the row is evaluated on instead of learnt."""

    def identity(self) -> Any:
        """Return, as JSON can hold it, what decides which rows these are."""


class ByPlace(NamedTuple):
    """About `share` of the rows, drawn by seed and place in the file: no row needs to know of another."""

    share: float
    seed: int

    def holds_out(self, spot: Spot, content: ContentOf) -> bool:
        """Tell whether the lot falls on this place."""
        return _lot(f"{self.seed} {spot.shard} {spot.place}".encode()) < self.share

    def identity(self) -> Any:
        """Return the share and the seed."""
        return ["place", self.share, self.seed]


class ByContent(NamedTuple):
    """About `share` of the rows, drawn by what they say: equal rows are never on both sides."""

    share: float

    def holds_out(self, spot: Spot, content: ContentOf) -> bool:
        """Tell whether the lot falls on rows that say this."""
        return _lot(content.digest) < self.share

    def identity(self) -> Any:
        """Return the share."""
        return ["content", self.share]


@dataclass(frozen=True)
class Contents:
    """What the validation rows say, read when it is first asked for."""

    rows: Callable[[], Iterator[Row]]
    identity: Mapping[str, Any]  # what decides which rows these are

    @cached_property
    def digests(self) -> frozenset[bytes]:
        """Return the digests of all of them."""
        return frozenset(content_digest(row) for row in self.rows())


class Exclusion:
    """Leaves the rows of one source out that say what a validation row says, and counts them."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.num_left_out = 0

    def leaves_out(self, content: ContentOf) -> bool:
        """Tell whether the row is among the validation rows."""
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


def _lot(drawn_by: bytes) -> float:
    """Return a number from 0 up to 1, as good as random, that these bytes always draw."""
    drawn = hashlib.blake2b(drawn_by, digest_size=8, person=b"finetune split").digest()
    return int.from_bytes(drawn, "big") / 2**64
