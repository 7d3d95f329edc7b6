"""Limits on decompressed data: a few kilobytes can decompress to terabytes of rows."""

import io
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

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
