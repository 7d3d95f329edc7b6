"""Origins of rows, and files of rows wherever they lie: which kind each is, how it is opened, and its digest."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from finetune.data.rows import RawRow
from finetune.data.sources.options import DEFAULT_OPTIONS, ReadOptions
from finetune.data.sources.readers import TABLE_KINDS, TEXT_KINDS, count_rows, rows_of
from finetune.data.sources.tables import ClassNames, table_class_names
from finetune.data.sources.unpacking import BoundedStream
from finetune.errors import DataError, FinetuneError
from finetune.runtime.optional import require
from finetune.runtime.text.secret_urls import without_query


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


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""From the endings of compressed texts to pyarrow's names."""


class StorageFile(Protocol):
    """A file on this machine or in object storage."""

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Return what reading it raises when it cannot be loaded."""

    @property
    def name(self) -> str:
        """Return its path or URL, for messages."""

    def open(self) -> BinaryIO:
        """Open it for reading."""

    def digest(self) -> str:
        """Return what changes when the content does."""

    def listing(self) -> Any:
        """Return name, size and time or tag, as JSON can hold them."""


@dataclass(frozen=True)
class DataFile:
    """One file of rows."""

    place: StorageFile
    options: ReadOptions = DEFAULT_OPTIONS

    @property
    def name(self) -> str:
        """Return its path or URL."""
        return self.place.name

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows without the first `start`; raises DataError where it cannot be read."""
        kind, compression = kind_of(self.name)
        with _readable(self.place), self.place.open() as stream:
            content = _decompressed(stream, compression, self.name)
            yield from rows_of(content, kind, origin=self.name, options=self.options, start=start)

    def beginning(self, num_bytes: int) -> bytes:
        """Return its first bytes, decompressed; raises DataError where it cannot be read."""
        with _readable(self.place), self.place.open() as stream:
            return _decompressed(stream, kind_of(self.name)[1], self.name).read(num_bytes)

    def num_rows(self, at_most: int) -> int:
        """Return how many rows it has, or `at_most`."""
        kind, compression = kind_of(self.name)
        with _readable(self.place), self.place.open() as stream:
            content = _decompressed(stream, compression, self.name)
            return count_rows(content, kind, origin=self.name, options=self.options, at_most=at_most)


@dataclass(frozen=True)
class Files:
    """Files of rows, read one after the other in the order of their names."""

    name: str
    places: tuple[StorageFile, ...]
    base: Path | None = None  # the folder that they were looked for in, on this machine
    options: ReadOptions = DEFAULT_OPTIONS

    @property
    def endings(self) -> frozenset[str]:
        """Return the endings of the files."""
        return frozenset(kind_of(place.name)[0] for place in self.places)

    @property
    def kind(self) -> str:
        """Return the ending of the first file."""
        return kind_of(self.places[0].name)[0]

    def image_folders(self) -> Sequence[Path]:
        """Return that folder."""
        return () if self.base is None else (self.base,)

    def shards(self) -> Sequence[DataFile]:
        """Return the files."""
        return tuple(DataFile(place, self.options) for place in self.places)

    def digest(self) -> str:
        """Return a digest of the files' contents and kinds; their names and folders do not matter."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for place in self.places:
            with _readable(place):
                digest.update(f"{kind_of(place.name)} {place.digest()}\n".encode())
        return digest.hexdigest()

    def listing(self) -> Any:
        """Return name, size and time or tag of every file."""
        return [place.listing() for place in self.places]

    def class_names(self) -> ClassNames:
        """Return the names that the first file gives to whole numbers, where it is a table."""
        if self.kind not in TABLE_KINDS:
            return {}
        with _readable(self.places[0]), self.places[0].open() as stream:
            return table_class_names(stream, self.kind)


def kind_of(name: str) -> tuple[str, str | None]:
    """Return the ending that tells the kind, and pyarrow's name of the compression.

    >>> kind_of("rows.jsonl.gz"), kind_of("rows.v2.PARQUET"), kind_of("README")
    (('.jsonl', 'gzip'), ('.parquet', None), ('', None))
    """
    base = without_query(name).replace("\\", "/").rpartition("/")[2].lower()
    for ending, compression in COMPRESSIONS.items():
        if base.endswith(ending):
            return _ending(base.removesuffix(ending)), compression
    return _ending(base), None


def is_readable(name: str) -> bool:
    """Return whether a file of that name has a kind that can be read."""
    kind, compression = kind_of(name)
    return kind in TEXT_KINDS or (kind in TABLE_KINDS and compression is None)


def require_readable(name: str) -> None:
    """Raise DataError with the kinds that can be read unless the file has one of them."""
    if not is_readable(name):
        raise DataError(
            f"{name}: unknown file type. Known extensions: {', '.join((*TEXT_KINDS, *TABLE_KINDS))}, "
            f"text formats also with {' or '.join(COMPRESSIONS)}."
        )


def select_one_kind(names: Sequence[str], *, folder: str) -> tuple[list[str], list[str]]:
    """Return the files of a folder that hold rows and those that do not; raises DataError unless they are of one kind.

    Files whose names begin with `.` or `_` are markers that other tools leave behind, and are in neither list.
    """
    visible = [name for name in names if not name.rpartition("/")[2].startswith((".", "_"))]
    held, others = [n for n in visible if is_readable(n)], [n for n in visible if not is_readable(n)]
    kinds = sorted({kind_of(name)[0] for name in held})
    if len(kinds) > 1:
        of_each = ", ".join(f"{sum(kind_of(name)[0] == kind for name in held)} {kind}" for kind in kinds)
        raise DataError(f"{folder} holds files of several kinds ({of_each}). Name one kind: {folder}/*{kinds[0]}.")
    if not held:
        found = f"only {', '.join(others[:5])}" if others else "no files"
        raise DataError(f"{folder} holds no data files: it has {found}. For its subfolders, write {folder}/**/*.jsonl.")
    return sorted(held), others


def format_not_read(names: Sequence[str]) -> str:
    """Return what is reported of files next to the rows: `also has README.md, which is not read`."""
    return f"also has {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not read"


def _ending(name: str) -> str:
    return f".{name.rpartition('.')[2]}" if "." in name else ""


def _decompressed(stream: BinaryIO, compression: str | None, origin: str) -> BinaryIO:
    if compression is None:
        return stream
    arrow = require("pyarrow", extra="dev", purpose="Reading compressed files")
    bounded = BoundedStream(arrow.CompressedInputStream(stream, compression), stream, origin)
    return cast(BinaryIO, bounded)


@contextmanager
def _readable(place: StorageFile) -> Iterator[None]:
    try:
        yield
    except FinetuneError:
        raise
    except place.faults as error:
        raise DataError(f"{place.name}: cannot be read: {error}") from error
