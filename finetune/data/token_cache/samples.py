"""Samples on disk: a file for each chunk of consecutive samples, and one with the columns of all of them.

`chunk-000000.bin`, `chunk-000001.bin`, ... hold the arrays of their samples end to end, the number of values of every
sample, and the columns: one value per sample, such as its length. `samples.bin` holds the columns of the whole
dataset, and for each array where the values of every sample start.
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
"""The arrays of the samples of a chunk have about this many bytes, or fewer."""

SAMPLES_FILE = "samples.bin"

_VALUES = ".values"
_NUM_VALUES = ".num_values"
_OFFSETS = ".offsets"


@dataclass(frozen=True)
class SampleArrays:
    """The arrays of consecutive samples, end to end."""

    values: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]  # of the same names: the number of values of each sample
    columns: Mapping[str, np.ndarray]  # one value per sample

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the values."""
        return sum(array.nbytes for array in self.values.values())


def chunk_name(number: int) -> str:
    """Return the name of the file of that chunk."""
    return f"chunk-{number:06d}.bin"


class SampleWriter:
    """Writes samples into the chunk files of a folder, after `chunks`, which it already holds; raises OSError."""

    def __init__(self, folder: Path, columns: Mapping[str, str], *, chunks: Sequence[ArrayFile] = ()) -> None:
        """`columns` are the types of the columns by name."""
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
        """Return the bytes of the samples that are not written yet."""
        return sum(arrays.size_bytes for arrays in self._pending)

    def append(self, arrays: SampleArrays) -> None:
        """Take the next samples; they are written by `write_chunk`."""
        self._pending.append(arrays)

    def write_chunk(self, facts: Mapping[str, Any]) -> None:
        """Write the pending samples into the next chunk file, together with the facts."""
        pieces: dict[str, ArrayPieces] = {}
        with_values = [arrays for arrays in self._pending if arrays.values]  # the others have no sample
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
        """Yield that array of every chunk that has it."""
        for number in range(self.num_chunks):
            if (array := ArrayFile(self._folder / chunk_name(number)).arrays.get(name)) is not None:
                yield array

    def _offsets(self, name: str) -> Iterator[np.ndarray]:
        """Yield where the values of every sample start, counted over all chunks, and where the last ones end."""
        stop = np.zeros(1, np.int64)
        yield stop
        for lengths in self._column(f"{name}{_NUM_VALUES}"):
            stops = stop + np.cumsum(lengths)
            stop = stops[-1:]
            yield stops


class StoredSamples:
    """The arrays of the samples of a folder by index, memory-mapped; raises Damaged.

    The columns, and where each sample's values start, are verified here unless another process has done so; the values
    are by `verification`.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str], names: Sequence[str], *, is_verified: bool = False
    ) -> None:
        opened = {name: ArrayFile(folder / name) for name in files}
        for name, file in opened.items():
            if file.content_digest != files[name]:
                raise Damaged(f"{name} is not the file that was written")
        index = opened.pop(SAMPLES_FILE)
        if not is_verified:
            index.verify()
        self.columns = index.arrays
        self.verification = Verification(list(opened.values()))
        offsets = [index.arrays[f"{name}{_OFFSETS}"] for name in names]
        chunks = [chunk.arrays for chunk in opened.values() if any(name.endswith(_VALUES) for name in chunk.arrays)]
        self._starts = list(accumulate((len(arrays[f"{names[0]}{_NUM_VALUES}"]) for arrays in chunks), initial=0))
        self._chunks = [  # of each array: its name, its values, where these start among all, and the offsets of all
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
        """Return that array of all samples, end to end, in a piece per chunk."""
        return [values for chunk in self._chunks for array, values, *_ in chunk if array == name]
