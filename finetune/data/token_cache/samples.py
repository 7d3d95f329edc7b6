"""Samples on disk: a file for each chunk of consecutive samples, and an index file with the columns of all samples.

`chunk-000000.bin`, `chunk-000001.bin`, ... contain the concatenated arrays of their samples, the number of values of
every sample, and the columns, which have one value per sample, such as its length. `samples.bin` contains the columns
of the whole dataset, and the offsets of every sample's values.

Each of these files is written atomically, memory-mapped for reading, and verified block by block. It contains its
arrays, each aligned to 64 bytes, then a JSON footer and the length of the footer in 8 bytes. The footer contains the
types and lengths of the arrays, the digests of their blocks, and a digest of itself.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from finetune.runtime.files.atomic import write_atomically
from finetune.runtime.files.digests import Damaged, check_digest, require_undamaged_file, with_digest
from finetune.runtime.files.read import parse_json

BLOCK_BYTES = 4 << 20
_DIGEST_DIGITS = 32  # of 128 bits in hexadecimal
_ALIGNMENT = 64
_LENGTH_BYTES = 8  # of the footer's length, at the end of the file

ArrayPieces = tuple[np.dtype[Any], Iterable[np.ndarray]]
"""The dtype of an array, and its values in consecutive pieces."""


def write_array_file(path: Path, arrays: Mapping[str, ArrayPieces], *, metadata: Mapping[str, Any]) -> None:
    """Write the arrays and `metadata`, which are plain JSON, atomically; the file survives a power cut."""
    layout: list[tuple[str, str, int]] = []
    digests = _BlockDigests()
    with write_atomically(path) as file:
        for name, (dtype, pieces) in arrays.items():
            num_values = 0
            for piece in pieces:
                if piece.dtype != dtype:
                    raise TypeError(f"{name} is {dtype}, but a piece is {piece.dtype}")
                content = np.ascontiguousarray(piece).view(np.uint8)
                file.write(content.data)
                digests.update(content)
                num_values += len(piece)
            padding = np.zeros(-num_values * dtype.itemsize % _ALIGNMENT, np.uint8)
            file.write(padding.data)
            digests.update(padding)
            layout.append((name, dtype.str, num_values))
        footer = json.dumps(with_digest({"arrays": layout, "digests": digests.hexdigest(), "facts": metadata})).encode()
        file.write(footer + len(footer).to_bytes(_LENGTH_BYTES, "little"))


class _BlockDigests:
    """Computes the digests of blocks of bytes that are added piece by piece."""

    def __init__(self) -> None:
        self._complete: list[str] = []
        self._block = xxhash.xxh3_128()
        self._missing_bytes = BLOCK_BYTES  # of the last block

    def update(self, content: np.ndarray) -> None:
        """Add the next bytes."""
        while len(content):
            piece, content = content[: self._missing_bytes], content[self._missing_bytes :]
            self._block.update(piece.data)
            self._missing_bytes -= len(piece)
            if self._missing_bytes == 0:
                self._complete.append(self._block.hexdigest())
                self._block, self._missing_bytes = xxhash.xxh3_128(), BLOCK_BYTES

    def hexdigest(self) -> str:
        """Return the concatenated digests; the last block may be shorter than the others."""
        last = [self._block.hexdigest()] if self._missing_bytes < BLOCK_BYTES else []
        return "".join(self._complete + last)


class ArrayFile:
    """The arrays of a file by name, mapped read-only; raises Damaged if the footer has changed since it was written.

    The file is not kept open: a dataset may have more files than the process's limit of open files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            require_undamaged_file(path)
            with path.open("rb") as file:
                state = os.fstat(file.fileno())
                end = state.st_size - _LENGTH_BYTES
                length = int.from_bytes(os.pread(file.fileno(), _LENGTH_BYTES, max(end, 0)), "little")
                if not 0 < length <= end:
                    raise ValueError("its footer is damaged")
                self.content_bytes = end - length
                footer = check_digest(parse_json(os.pread(file.fileno(), length, self.content_bytes)))
            # unlike NumPy and `mmap`, torch does not keep the file open
            mapped = torch.from_file(str(path), shared=False, size=state.st_size, dtype=torch.uint8).numpy()
        except (OSError, ValueError, RuntimeError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}") from error
        mapped.flags.writeable = False
        self._digests: str = footer["digests"]
        self.metadata: dict[str, Any] = footer["facts"]
        self.content_digest = xxhash.xxh3_128_hexdigest(json.dumps([footer["arrays"], self._digests]).encode())
        self.arrays: dict[str, np.ndarray] = {}
        start = 0
        for name, dtype, num_values in footer["arrays"]:
            stop = start + num_values * np.dtype(dtype).itemsize
            self.arrays[name] = mapped[start:stop].view(dtype)
            start = stop + -stop % _ALIGNMENT
        if start != self.content_bytes:
            raise Damaged(f"{path.name} has {self.content_bytes:,} bytes of arrays, but {start:,} were written")

    def verify(self) -> None:
        """Raise Damaged if a block has changed since it was written."""
        try:
            with self._path.open("rb") as file:  # read, not mapped: a bad sector then raises instead of SIGBUS
                for number, start in enumerate(range(0, self.content_bytes, BLOCK_BYTES)):
                    stop = min(start + BLOCK_BYTES, self.content_bytes)
                    written = self._digests[number * _DIGEST_DIGITS : (number + 1) * _DIGEST_DIGITS]
                    if xxhash.xxh3_128_hexdigest(file.read(stop - start)) != written:
                        raise Damaged(f"{self._path.name} has changed between bytes {start:,} and {stop:,}")
        except OSError as error:
            raise Damaged(f"{self._path.name} cannot be read: {error}") from error


CHUNK_BYTES = 64 << 20
"""The approximate maximum size of the arrays in a chunk file."""

SAMPLES_FILE = "samples.bin"

_VALUES = ".values"
_NUM_VALUES = ".num_values"
_OFFSETS = ".offsets"


@dataclass(frozen=True)
class SampleArrays:
    """The concatenated arrays of consecutive samples."""

    values: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]  # the number of values of each sample, by the same names
    columns: Mapping[str, np.ndarray]  # one value per sample


def chunk_name(number: int) -> str:
    """Return the file name of a chunk."""
    return f"chunk-{number:06d}.bin"


class SampleWriter:
    """Writes samples into the chunk files of a folder, after its existing `chunks`; raises OSError."""

    def __init__(self, folder: Path, columns: Mapping[str, str], *, chunks: Sequence[ArrayFile] = ()) -> None:
        """`columns` maps the names of the columns to their dtypes."""
        self._folder = folder
        self._columns = columns
        self._pending: list[SampleArrays] = []
        self.pending_bytes = 0  # of the values that are not written yet
        self.chunk_digests: list[str] = []
        self._names: list[str] = []  # of the arrays of a sample
        for chunk in chunks:
            self._add(chunk)

    def append(self, arrays: SampleArrays) -> None:
        """Append the next samples, which `write_chunk` writes."""
        self._pending.append(arrays)
        self.pending_bytes += sum(values.nbytes for values in arrays.values.values())

    def write_chunk(self, metadata: Mapping[str, Any]) -> None:
        """Write the pending samples into the next chunk file, together with the facts."""
        pieces: dict[str, ArrayPieces] = {}
        with_values = [arrays for arrays in self._pending if arrays.values]  # the others have no samples
        for name in with_values[0].values if with_values else ():
            values = [arrays.values[name] for arrays in with_values]
            lengths = [arrays.lengths[name].astype(np.int64) for arrays in with_values]
            pieces[f"{name}{_VALUES}"] = (values[0].dtype, values)
            pieces[f"{name}{_NUM_VALUES}"] = (np.dtype(np.int64), lengths)
        for name, dtype in self._columns.items():
            pieces[name] = (np.dtype(dtype), [arrays.columns[name] for arrays in self._pending])
        path = self._folder / chunk_name(len(self.chunk_digests))
        write_array_file(path, pieces, metadata=metadata)
        self._add(ArrayFile(path))
        self._pending.clear()
        self.pending_bytes = 0

    def finish(self) -> tuple[list[str], dict[str, str]]:
        """Write the columns of all chunks; return the names of the arrays and the digest of each file."""
        pieces: dict[str, ArrayPieces] = {
            name: (np.dtype(dtype), self._column(name)) for name, dtype in self._columns.items()
        }
        for name in self._names:
            pieces[f"{name}{_OFFSETS}"] = (np.dtype(np.int64), self._offsets(name))
        path = self._folder / SAMPLES_FILE
        write_array_file(path, pieces, metadata={})
        files = {chunk_name(number): digest for number, digest in enumerate(self.chunk_digests)}
        return self._names, {**files, SAMPLES_FILE: ArrayFile(path).content_digest}

    def _add(self, chunk: ArrayFile) -> None:
        self.chunk_digests.append(chunk.content_digest)
        if not self._names:
            self._names = [name.removesuffix(_VALUES) for name in chunk.arrays if name.endswith(_VALUES)]

    def _column(self, name: str) -> Iterator[np.ndarray]:
        """Yield the array with that name from every chunk that has it."""
        for number in range(len(self.chunk_digests)):
            if (array := ArrayFile(self._folder / chunk_name(number)).arrays.get(name)) is not None:
                yield array

    def _offsets(self, name: str) -> Iterator[np.ndarray]:
        """Yield the offsets of every sample's values over all chunks, and the end of the last sample."""
        stop = np.zeros(1, np.int64)
        yield stop
        for lengths in self._column(f"{name}{_NUM_VALUES}"):
            stops = stop + np.cumsum(lengths)
            stop = stops[-1:]
            yield stops


class StoredSamples:
    """The arrays of the samples of a folder by index, memory-mapped; raises Damaged.

    Columns and offsets are verified here unless another process has done so (`is_verified`); `verify` verifies the
    values.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str], names: Sequence[str], *, is_verified: bool = False
    ) -> None:
        opened = {name: ArrayFile(folder / name) for name in files}
        for name, file in opened.items():
            if file.content_digest != files[name]:
                raise Damaged(f"{name} is not the file that was originally written")
        index = opened.pop(SAMPLES_FILE)
        if not is_verified:
            index.verify()
        self.columns = index.arrays
        self._chunk_files = list(opened.values())
        self.size_bytes = sum(file.content_bytes for file in self._chunk_files)
        offsets = [index.arrays[f"{name}{_OFFSETS}"] for name in names]
        chunks = [chunk.arrays for chunk in opened.values() if any(name.endswith(_VALUES) for name in chunk.arrays)]
        self._starts = list(accumulate((len(arrays[f"{names[0]}{_NUM_VALUES}"]) for arrays in chunks), initial=0))
        self._chunks = [  # for each array: name, values, offset of the chunk, and offsets of all samples
            [
                (name, arrays[f"{name}{_VALUES}"], offsets_of_name.item(start), offsets_of_name)
                for name, offsets_of_name in zip(names, offsets, strict=True)
            ]
            for start, arrays in zip(self._starts, chunks, strict=False)
        ]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {
            name: values[offsets.item(index) - start : offsets.item(index + 1) - start]
            for name, values, start, offsets in self._chunks[bisect_right(self._starts, index) - 1]
        }

    def verify(self) -> None:
        """Read the values once; raises Damaged if they have changed since they were written."""
        for file in self._chunk_files:
            file.verify()

    def pieces(self, name: str) -> list[np.ndarray]:
        """Return the concatenated array of all samples, in one piece per chunk."""
        return [values for chunk in self._chunks for array, values, *_ in chunk if array == name]
