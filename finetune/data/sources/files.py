"""Origins of rows, and data files in any storage: their format, how they are opened, and their digests."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from finetune.data.rows import RawRow
from finetune.data.sources.readers import DEFAULT_OPTIONS, TABLE_KINDS, TEXT_KINDS, ReadOptions, rows_of
from finetune.data.sources.tables import ClassNames, num_parquet_rows, table_class_names
from finetune.errors import DataError, FinetuneError
from finetune.runtime.optional import require
from finetune.runtime.text.redact import without_query


@dataclass(frozen=True)
class OriginShard:
    """A part of an origin that can be read independently: a file, or a shard of a hub dataset."""

    name: str  # for messages

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows in order, without the first `start`; raises DataError if it cannot be read."""
        raise NotImplementedError

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows, but at most `at_most`."""
        return sum(1 for _ in islice(self.rows(), at_most))


@dataclass(frozen=True)
class Origin(OriginShard):
    """All rows of a `path`, `name` or `source` in the job YAML; one that cannot be divided is its own only shard."""

    image_folders: tuple[Path, ...] = field(default=(), kw_only=True)  # local ones that may hold images of its rows

    def shards(self) -> Sequence[OriginShard]:
        """Return its shards in order."""
        return (self,)

    @cached_property
    def digest(self) -> str:
        """Return a digest of the content."""
        raise NotImplementedError

    def listing(self) -> Any:
        """Return JSON values that change when the content may have changed, without reading the content."""
        return self.digest

    def class_names(self) -> ClassNames:
        """Return its class names, by column."""
        return {}


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""The extensions of compressed text files, and pyarrow's names of the compressions."""


@dataclass(frozen=True)
class DataFile(OriginShard):
    """A file of rows on this machine or in object storage; its name is the path or URL."""

    faults: ClassVar[tuple[type[Exception], ...]]  # the exceptions that reading it may raise
    options: ReadOptions = field(default=DEFAULT_OPTIONS, kw_only=True)

    def open(self) -> BinaryIO:
        """Open it for reading, not decompressed."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a digest that changes with the content."""
        raise NotImplementedError

    def listing(self) -> Any:
        """Return name, size and time or tag, as JSON values; the folder does not matter."""
        raise NotImplementedError

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows without the first `start`; raises DataError if it cannot be read."""
        with self._decompressed() as content:
            yield from rows_of(content, kind_of(self.name)[0], origin=self.name, options=self.options, start=start)

    def beginning(self, num_bytes: int) -> bytes:
        """Return its first bytes, decompressed; raises DataError if it cannot be read."""
        with self._decompressed() as content:
            return content.read(num_bytes)

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows, but at most `at_most`; that of a Parquet file is in its metadata."""
        if kind_of(self.name)[0] != ".parquet":
            return super().num_rows(at_most)
        with self._decompressed() as content:
            return min(at_most, num_parquet_rows(content))

    @contextmanager
    def _decompressed(self) -> Iterator[BinaryIO]:
        """Yield the content, decompressed; faults of reading it become a DataError."""
        compression = kind_of(self.name)[1]
        with _readable(self), self.open() as stream:
            if compression is None:
                yield stream
                return
            arrow = require("pyarrow", extra="dev", purpose="Reading compressed files")
            yield cast(BinaryIO, arrow.CompressedInputStream(stream, compression))


@dataclass(frozen=True)
class Files(Origin):
    """Data files, read one after the other in the order of their names."""

    files: tuple[DataFile, ...]

    @property
    def kind(self) -> str:
        """Return the extension of the first file."""
        return kind_of(self.files[0].name)[0]

    def shards(self) -> Sequence[DataFile]:
        """Return the files."""
        return self.files

    @cached_property
    def digest(self) -> str:
        """Return a digest of the files' contents and formats; names and folders do not matter."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            with _readable(file):
                digest.update(f"{kind_of(file.name)} {file.digest()}\n".encode())
        return digest.hexdigest()

    def listing(self) -> Any:
        """Return name, size and time or tag of every file."""
        return [file.listing() for file in self.files]

    def class_names(self) -> ClassNames:
        """Return the class names of the first file if it is a table."""
        if self.kind not in TABLE_KINDS:
            return {}
        with _readable(self.files[0]), self.files[0].open() as stream:
            return table_class_names(stream, self.kind)


def kind_of(name: str) -> tuple[str, str | None]:
    """Return the extension of the format, and pyarrow's name of the compression.

    >>> kind_of("rows.jsonl.gz"), kind_of("rows.v2.PARQUET"), kind_of("README")
    (('.jsonl', 'gzip'), ('.parquet', None), ('', None))
    """
    file_name = without_query(name).replace("\\", "/").rpartition("/")[2].lower()
    compressed = next((extension for extension in COMPRESSIONS if file_name.endswith(extension)), "")
    plain = file_name.removesuffix(compressed)
    return f".{plain.rpartition('.')[2]}" if "." in plain else "", COMPRESSIONS.get(compressed)


def is_readable(name: str) -> bool:
    """Return whether a file of that name has a supported format."""
    kind, compression = kind_of(name)
    return kind in TEXT_KINDS or (kind in TABLE_KINDS and compression is None)


def require_readable(name: str) -> None:
    """Raise DataError listing the supported formats unless the file has one of them."""
    if not is_readable(name):
        raise DataError(
            f"{name}: unknown file type. Known extensions: {', '.join((*TEXT_KINDS, *TABLE_KINDS))}, "
            f"text formats also with {' or '.join(COMPRESSIONS)}."
        )


def select_one_kind(names: Sequence[str], *, folder: str) -> tuple[list[str], list[str]]:
    """Return the data files of a folder and its other files; raises DataError unless there is one data format.

    Files whose names start with `.` or `_` are markers of other tools, and are in neither list.
    """
    visible = [name for name in names if not name.rpartition("/")[2].startswith((".", "_"))]
    data_files, others = [n for n in visible if is_readable(n)], [n for n in visible if not is_readable(n)]
    kinds = sorted({kind_of(name)[0] for name in data_files})
    if len(kinds) > 1:
        counts = ", ".join(f"{sum(kind_of(name)[0] == kind for name in data_files)} {kind}" for kind in kinds)
        raise DataError(f"{folder} contains files of several formats ({counts}). Select one: {folder}/*{kinds[0]}.")
    if not data_files:
        other_files = f"only {', '.join(others[:5])}" if others else "and no other files"
        raise DataError(
            f"{folder} contains no data files, {other_files}. For its subfolders, write {folder}/**/*.jsonl."
        )
    return sorted(data_files), others


def format_not_read(names: Sequence[str]) -> str:
    """Return a message about files that are not data files: `also has README.md, which is not read`."""
    return f"also has {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not read"


@contextmanager
def _readable(file: DataFile) -> Iterator[None]:
    try:
        yield
    except FinetuneError:
        raise
    except file.faults as error:
        raise DataError(f"{file.name}: cannot be read: {error}") from error
