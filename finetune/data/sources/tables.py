"""Read rows of Parquet and Arrow files in batches, from any row on, and the class names in their schemas."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

from finetune.data.rows import RawRow, Row, shortened
from finetune.errors import DataError
from finetune.runtime.optional import require

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
        batches = table.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups) if groups else iter(())
        yield from _numbered(batches, origin, passed=start - first, skipped=first)


def num_parquet_rows(stream: BinaryIO) -> int:
    """Return the number of rows in the file's metadata."""
    with _parquet().ParquetFile(stream) as table:
        return int(table.metadata.num_rows)


def table_class_names(stream: BinaryIO, kind: str) -> ClassNames:
    """Return the class names in the file's schema; empty if it has none or cannot be read."""
    arrow = require("pyarrow", extra="dev", purpose="Reading tables")
    try:
        schema = _parquet().read_schema(stream) if kind == ".parquet" else _opened_arrow(stream).schema
        return class_names_in(schema.metadata)
    except arrow.ArrowException:  # reported when its rows are read
        return {}


def arrow_rows(stream: BinaryIO, origin: str, start: int) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file or stream without the first `start`; raises DataError for anything else.

    Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
    """
    with _readable(origin, "Arrow"):
        table = _opened_arrow(stream)
        is_file = hasattr(table, "num_record_batches")
        batches = map(table.get_batch, range(table.num_record_batches)) if is_file else iter(table)
        yield from _numbered(batches, origin, passed=0, skipped=start)


def _opened_arrow(stream: BinaryIO) -> Any:
    """Return a reader of the Arrow file, which has a magic number, or of the Arrow stream."""
    ipc = require("pyarrow.ipc", extra="dev", purpose="Reading Arrow")
    is_file = stream.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    stream.seek(0)
    return ipc.open_file(stream) if is_file else ipc.open_stream(stream)


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
