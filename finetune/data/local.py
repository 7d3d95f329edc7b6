"""Rows of local files: JSON lines (also gzipped), JSON, CSV and Parquet."""

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.rows import RawRow
from finetune.errors import DataError
from finetune.runtime.optional import require

_HASHED_BYTES = 1 << 20
_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class LocalFiles:
    """Files of rows, read one after the other in the order of their names."""

    name: str
    files: tuple[Path, ...]

    def digest(self) -> str:
        """Return a digest of the files' contents and kinds; their names and folders do not matter."""
        digest = hashlib.blake2b(digest_size=16)
        with _readable(self.name):
            for file in self.files:
                digest.update(f"{_kind(file)} {file.stat().st_size}\n".encode())
                with file.open("rb") as stream:
                    while block := stream.read(_HASHED_BYTES):
                        digest.update(block)
        return digest.hexdigest()

    def listing(self) -> Any:
        """Return the name, size and time of every file."""
        return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]

    def shards(self) -> Sequence["LocalFile"]:
        """Return the files."""
        return tuple(LocalFile(file) for file in self.files)


@dataclass(frozen=True)
class LocalFile:
    """One file of rows."""

    file: Path

    @property
    def name(self) -> str:
        """Return its path."""
        return str(self.file)

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows without the first `start`; raises DataError naming the file that cannot be read."""
        with _readable(self.name):
            yield from islice(_READERS[_kind(self.file)](self.file), start, None)

    def num_rows(self, at_most: int) -> int:
        """Return how many rows it has, or `at_most`."""
        return sum(1 for _ in islice(self.rows(), at_most))


def find_files(pattern: str) -> LocalFiles:
    """Return the file, or the files of a glob sorted by name; raises DataError when there is none that can be read."""
    path = Path(pattern)
    if path.is_dir():
        raise DataError(f"{pattern} is a folder. Name a file, or a glob such as {pattern.rstrip('/')}/*.jsonl.")
    files = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"{pattern}: there is no such file. A relative path is resolved against the config file's folder."
        )
    for file in files:
        if _kind(file) not in _READERS:
            raise DataError(f"{file}: cannot tell how to read it. Known endings: {', '.join(_READERS)}.")
    return LocalFiles(pattern, tuple(files))


def _kind(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read: {error}") from error


def _json_lines(file: Path) -> Iterator[RawRow]:
    with file.open("rb") as stream:
        yield from _lines(stream, origin=str(file))


def _gzipped_json_lines(file: Path) -> Iterator[RawRow]:
    with gzip.open(file, "rb") as stream:
        yield from _lines(stream, origin=str(file))


def _lines(stream: io.BufferedIOBase, *, origin: str) -> Iterator[RawRow]:
    """Yield the lines that are not blank."""
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if content:
            yield RawRow(origin, number, content)


def _json(file: Path) -> Iterator[RawRow]:
    """Yield the objects of one JSON array; a file that does not begin with `[` is read as JSON lines."""
    with file.open("rb") as stream:
        is_array = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if not is_array:
        yield from _json_lines(file)
        return
    try:
        values = json.loads(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}.") from error
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(f"{file}, row {number}: each element of the array must be an object with columns.")
        yield RawRow(str(file), number, value)


def _csv(file: Path) -> Iterator[RawRow]:
    """Yield the rows below the header line; every value is text."""
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for number, row in enumerate(reader, start=1):
                if None in row or None in row.values():
                    width = len(reader.fieldnames or ())
                    raise DataError(
                        f"{file}, row {number} (line {reader.line_num}): has not the {width} fields of the header. "
                        "A comma inside a text needs quotes around the text."
                    )
                yield RawRow(str(file), number, row)
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: not valid CSV: {error}.") from error


def _parquet(file: Path) -> Iterator[RawRow]:
    arrow = require("pyarrow", extra="dev", purpose="Reading Parquet")
    parquet = require("pyarrow.parquet", extra="dev", purpose="Reading Parquet")
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(str(file), number, row)
    except arrow.ArrowException as error:
        raise DataError(f"{file}: not a Parquet file that can be read: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _gzipped_json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
