"""Read rows of Parquet and Arrow files in batches, from any row on, and the class names in their schemas."""

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

from finetune.data.rows import RawRow, Row, shortened
from finetune.errors import DataError
from finetune.runtime.optional import require

MAX_ROW_BYTES = 256 << 20
"""The limit of a row."""

MAX_TIMES, FREE_BYTES = 300, 64 << 20
"""The largest compression ratio, and a size that is always allowed; natural text has a ratio of 3 to 30."""

_MAX_BATCH_BYTES = 256 << 20
_ROW_BYTES = 16  # the cost of an empty row


def require_no_bomb(unpacked: int, *, packed: int, origin: str) -> None:
    """Raise DataError if the decompressed size suggests a decompression bomb."""
    if unpacked > FREE_BYTES + MAX_TIMES * packed:
        raise DataError(
            f"{origin}: {packed:,} bytes decompress to more than {unpacked >> 20:,} MB, over {MAX_TIMES} times as "
            "much, which suggests a decompression bomb. If it is intended, write the rows uncompressed, as .jsonl."
        )


class BoundedStream(io.RawIOBase):
    """A decompressed stream; reading it raises DataError if the compression ratio is too large."""

    def __init__(self, unpacked: Any, packed: BinaryIO, origin: str) -> None:
        self._unpacked, self._packed, self._origin = unpacked, packed, origin
        self._num_bytes = 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into the buffer and return their number."""
        count = int(self._unpacked.readinto(buffer))
        self._num_bytes += count
        require_no_bomb(self._num_bytes, packed=self._packed.tell(), origin=self._origin)
        return count


def parquet_batches(stream: BinaryIO, table: Any, groups: list[int], *, origin: str, num_rows: int) -> Iterator[Any]:
    """Yield batches of at most `num_rows` rows of these row groups of a Parquet file, with bounded memory.

    A dictionary page stores a text once for any number of rows. If its longest text could make a batch too large, the
    texts stay dictionary-encoded and their sizes are checked before rows are created. Raises DataError for rows, or for
    a file, that would be too large.
    """
    parquet = require("pyarrow.parquet", extra="dev", purpose="Reading Parquet")
    packed, unpacked = stream.seek(0, io.SEEK_END), 0
    for group in groups:
        facts = table.metadata.row_group(group)
        require_no_bomb(facts.total_byte_size, packed=packed, origin=origin)
        longest = _longest_texts(parquet, stream, table.metadata, group)
        group_bytes = sum(length * facts.column(column).num_values for column, length in longest.items())
        if group_bytes * num_rows / max(1, facts.num_rows) <= _MAX_BATCH_BYTES:
            batches = table.iter_batches(batch_size=num_rows, row_groups=[group])
        else:
            kept = [facts.column(column).path_in_schema for column in longest]
            reader = parquet.ParquetFile(stream, metadata=table.metadata, read_dictionary=kept)
            batches = _small_slices(reader.iter_batches(batch_size=num_rows, row_groups=[group]), origin)
        for batch in batches:
            unpacked += sum(map(_unpacked_bytes, batch.columns)) + _ROW_BYTES * batch.num_rows
            require_no_bomb(unpacked, packed=packed, origin=origin)
            yield batch


def _longest_texts(parquet: Any, stream: BinaryIO, metadata: Any, group: int) -> Mapping[int, int]:
    """Return the length of the longest text in the first dictionary of each dictionary-encoded text column."""
    compute = require("pyarrow.compute", extra="dev", purpose="Reading Parquet")
    facts, longest = metadata.row_group(group), {}
    for number in range(facts.num_columns):
        column = facts.column(number)
        if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page and facts.num_rows:
            path = column.path_in_schema
            reader = parquet.ParquetFile(stream, metadata=metadata, read_dictionary=[path])
            batch = next(reader.iter_batches(batch_size=1, row_groups=[group], columns=[path]))
            texts = _first_dictionary(batch.columns[0])
            longest[number] = 0 if texts is None else compute.max(compute.binary_length(texts)).as_py() or 0
    return longest


def _first_dictionary(array: Any) -> Any:
    if hasattr(array, "dictionary"):
        return array.dictionary
    return next((dictionary for inner in _inner(array) if (dictionary := _first_dictionary(inner)) is not None), None)


def _inner(array: Any) -> list[Any]:
    """Return the columns within a column of lists, objects or maps."""
    if hasattr(array, "keys"):
        return [array.keys, array.items]
    values = array.flatten() if hasattr(array, "flatten") else []
    return values if isinstance(values, list) else [values]


def _small_slices(batches: Iterator[Any], origin: str) -> Iterator[Any]:
    """Yield the rows of batches one at a time; raises DataError for a row that is too large."""
    for batch in batches:
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            if sum(map(_unpacked_bytes, row.columns)) > MAX_ROW_BYTES:
                raise DataError(f"{origin}: a row has more than {MAX_ROW_BYTES >> 20} MB: this is not a row.")
            yield row


def _unpacked_bytes(array: Any) -> int:
    """Return the decoded size of the values in bytes; a dictionary value counts for every occurrence."""
    if hasattr(array, "dictionary"):
        compute = require("pyarrow.compute", extra="dev", purpose="Reading Parquet")
        lengths = compute.binary_length(array.dictionary).cast("int64")
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    inner = _inner(array)
    return sum(map(_unpacked_bytes, inner)) if inner else int(array.nbytes)


ClassNames = Mapping[str, tuple[str, ...]]
"""The names of the classes 0, 1, 2, ... by column."""

_METADATA = b"huggingface"


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Return the class names of columns of integers, or of lists of integers.

    `features` is the description that `datasets` writes: `{"label": {"names": [...], "_type": "ClassLabel"}}`.
    """
    names_of = {column: _names(described) for column, described in features.items()}
    return {column: names for column, names in names_of.items() if names}


def class_names_in(metadata: Mapping[bytes, bytes] | None) -> ClassNames:
    """Return the class names in the metadata of a Parquet or Arrow schema; empty if it cannot be parsed."""
    try:
        written = json.loads((metadata or {})[_METADATA])
        return class_names(written["info"]["features"])
    except (KeyError, ValueError, TypeError, AttributeError):  # the metadata may be anything
        return {}


def _names(described: Any) -> tuple[str, ...]:
    """Return the names in a column's description; lists are `{"feature": ..., "_type": "List"}`, formerly `[...]`."""
    if isinstance(described, list) and len(described) == 1:
        return _names(described[0])
    if not isinstance(described, Mapping):
        return ()
    if described.get("_type") == "ClassLabel":
        return tuple(map(str, described.get("names") or ()))
    return _names(described.get("feature"))


_BATCH_ROWS = 1024
_FAULTS = (ValueError, OverflowError, TypeError, KeyError, RecursionError, NotImplementedError)
_ARROW_MAGIC = b"ARROW1"


def parquet_rows(stream: BinaryIO, origin: str, start: int) -> Iterator[RawRow]:
    """Yield the rows without the first `start`; row groups before them are not read.

    Raises DataError if the file is not valid Parquet.
    """
    with _readable(origin, "Parquet"), _parquet().ParquetFile(stream) as table:
        first, groups = start, list(range(table.num_row_groups))
        while groups and table.metadata.row_group(groups[0]).num_rows <= first:
            first -= table.metadata.row_group(groups.pop(0)).num_rows
        batches = parquet_batches(stream, table, groups, origin=origin, num_rows=_BATCH_ROWS)
        yield from _numbered(batches, origin, passed=start - first, skipped=first)


def num_parquet_rows(stream: BinaryIO) -> int:
    """Return the number of rows in the file's metadata."""
    with _parquet().ParquetFile(stream) as table:
        return int(table.metadata.num_rows)


def table_class_names(stream: BinaryIO, kind: str) -> ClassNames:
    """Return the class names in the file's schema; empty if it has none or cannot be read."""
    arrow = require("pyarrow", extra="dev", purpose="Reading tables")
    try:
        if kind == ".parquet":
            return class_names_in(_parquet().read_schema(stream).metadata)
        ipc = require("pyarrow.ipc", extra="dev", purpose="Reading Arrow")
        is_file = stream.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        stream.seek(0)
        return class_names_in((ipc.open_file if is_file else ipc.open_stream)(stream).schema.metadata)
    except arrow.ArrowException:  # reported when its rows are read
        return {}


def arrow_rows(stream: BinaryIO, origin: str, start: int) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file or stream without the first `start`; raises DataError for anything else.

    Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
    """
    ipc = require("pyarrow.ipc", extra="dev", purpose="Reading Arrow")
    with _readable(origin, "Arrow"):
        is_file = stream.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        stream.seek(0)
        if is_file:
            table = ipc.open_file(stream)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = iter(ipc.open_stream(stream))
        yield from _numbered(batches, origin, passed=0, skipped=start)


def _numbered(batches: Iterator[Any], origin: str, *, passed: int, skipped: int) -> Iterator[RawRow]:
    """Yield the batches' rows without the first `skipped`; `passed` rows of the file precede the first batch."""
    for batch in batches:
        if duplicates := [name for name, count in Counter(batch.schema.names).items() if count > 1]:
            raise DataError(f"{origin}: has the column `{shortened(duplicates[0])}` twice. Keep one of them.")
        batch.validate(full=True)  # otherwise offsets beyond the data of a damaged file are read unchecked
        for start in range(min(skipped, batch.num_rows), batch.num_rows, _BATCH_ROWS):
            piece, first = batch.slice(start, _BATCH_ROWS), passed + start + 1
            try:
                rows = piece.to_pylist()
            except _FAULTS as error:
                raise DataError(
                    f"{origin}, rows {first} to {first + piece.num_rows - 1}: cannot be read: {error}. Give the column "
                    "another type, such as text."
                ) from error
            for number, row in enumerate(rows, start=first):
                yield RawRow(origin, number, without_fillers(row))
        passed += batch.num_rows
        skipped = max(0, skipped - batch.num_rows)


def without_fillers(row: Row) -> Row:
    """Return the row without the nulls inside of its lists and objects.

    A table gives all objects of a column the same keys and writes null for absent ones. These cannot be distinguished
    from explicit nulls, which are rare.
    """
    return {name: _unfilled(value) if isinstance(value, list | dict) else value for name, value in row.items()}


def _unfilled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unfilled(inner) for name, inner in value.items() if inner is not None}
    return [_unfilled(inner) for inner in value] if isinstance(value, list) else value


def _parquet() -> ModuleType:
    return require("pyarrow.parquet", extra="dev", purpose="Reading Parquet")


@contextmanager
def _readable(origin: str, kind: str) -> Iterator[None]:
    arrow = require("pyarrow", extra="dev", purpose=f"Reading {kind}")
    try:
        yield
    except DataError:
        raise
    except (arrow.ArrowException, *_FAULTS) as error:  # from the file, and from values without a Python equivalent
        raise DataError(f"{origin}: not readable as {kind}: {error}") from error
    except OSError as error:
        if error.errno is not None:  # a disk error, not invalid content
            raise
        raise DataError(f"{origin}: damaged, not readable as {kind}: {error}") from error
