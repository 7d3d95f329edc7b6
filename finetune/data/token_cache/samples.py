"""Samples on disk: a file for each chunk of consecutive samples, and an index file with the columns of all samples.

`chunk-000000.bin`, `chunk-000001.bin`, ... contain the concatenated arrays of their samples, the number of values of
every sample, and the columns, which have one value per sample, such as its length. `samples.bin` contains the columns
of the whole dataset, and the offsets of every sample's values.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.token_cache.array_file import ArrayFile, ArrayPieces, Verification, write_array_file
from finetune.runtime.files.digests import Damaged

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

    @property
    def size_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return sum(array.nbytes for array in self.values.values())


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
        self._chunk_digests: list[str] = []
        self._names: list[str] = []  # of the arrays of a sample
        for chunk in chunks:
            self._add(chunk)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunk files."""
        return len(self._chunk_digests)

    @property
    def pending_bytes(self) -> int:
        """Return the size of the samples that are not written yet."""
        return sum(arrays.size_bytes for arrays in self._pending)

    def append(self, arrays: SampleArrays) -> None:
        """Append the next samples, which `write_chunk` writes."""
        self._pending.append(arrays)

    def write_chunk(self, facts: Mapping[str, Any]) -> None:
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
        path = self._folder / chunk_name(self.num_chunks)
        write_array_file(path, pieces, facts=facts)
        self._add(ArrayFile(path))
        self._pending.clear()

    def finish(self) -> tuple[list[str], dict[str, str]]:
        """Write the columns of all chunks; return the names of the arrays and the digest of each file."""
        pieces: dict[str, ArrayPieces] = {
            name: (np.dtype(dtype), self._column(name)) for name, dtype in self._columns.items()
        }
        for name in self._names:
            pieces[f"{name}{_OFFSETS}"] = (np.dtype(np.int64), self._offsets(name))
        path = self._folder / SAMPLES_FILE
        write_array_file(path, pieces, facts={})
        files = {chunk_name(number): digest for number, digest in enumerate(self._chunk_digests)}
        return self._names, {**files, SAMPLES_FILE: ArrayFile(path).content_digest}

    def _add(self, chunk: ArrayFile) -> None:
        self._chunk_digests.append(chunk.content_digest)
        if not self._names:
            self._names = [name.removesuffix(_VALUES) for name in chunk.arrays if name.endswith(_VALUES)]

    def _column(self, name: str) -> Iterator[np.ndarray]:
        """Yield the array with that name from every chunk that has it."""
        for number in range(self.num_chunks):
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

    Columns and offsets are verified here unless another process has done so (`is_verified`); `verification` verifies
    the values.
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
        self.verification = Verification(list(opened.values()))
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

    def pieces(self, name: str) -> list[np.ndarray]:
        """Return the concatenated array of all samples, in one piece per chunk."""
        return [values for chunk in self._chunks for array, values, *_ in chunk if array == name]
