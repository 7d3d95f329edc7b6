"""Where rows come from, whole: files or a hub dataset, in shards that can be read from any row on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from finetune.data.rows import RawRow
from finetune.data.sources.class_names import ClassNames


class OriginShard(Protocol):
    """A part of an origin that is read without the others: a file, or a shard of a hub dataset."""

    @property
    def name(self) -> str:
        """Return what it is called in messages."""

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows in their order, without the first `start`; raises DataError where it cannot be read."""

    def num_rows(self, at_most: int) -> int:
        """Return how many rows it has, or `at_most` where that is less."""


class Origin(Protocol):
    """All rows that a `path` or a `name` of the job YAML stands for."""

    @property
    def name(self) -> str:
        """Return what it is called in messages."""

    def shards(self) -> Sequence[OriginShard]:
        """Return its parts in their order."""

    def digest(self) -> str:
        """Return a digest of the content."""

    def listing(self) -> Any:
        """Return, as JSON can hold it, what tells that the content may have changed, without reading the content."""

    def image_folders(self) -> Sequence[Path]:
        """Return the folders of this machine that files of images which its rows name may lie in; mostly one."""

    def class_names(self) -> ClassNames:
        """Return the names that it gives to whole numbers, by column."""
