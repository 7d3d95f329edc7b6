"""Arrays on disk that grow, and that can be taken up again at a length that was noted."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from finetune.data.verified.arrays import ArrayFacts
from finetune.data.verified.blocks import BlockDigests

_PIECE_BYTES = 1 << 20


class ArrayNote(NamedTuple):
    """What an array was when it was last brought to the disk."""

    dtype: str
    length: int = 0
    digest: str = ""  # of all its values


class GrowingArray:
    """An `.npy` file that is appended to; its header is right once `finish` has been called.

    With a note, an existing file goes on from there, and what stands behind is cut off; raises ValueError where the
    file is not that long, or does not hold what it held.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, note: ArrayNote | None = None) -> None:
        self.length = note.length if note else 0
        self._dtype = dtype
        self._digests = BlockDigests()
        self._file: BinaryIO = path.open("r+b" if self.length else "wb")
        self._write_header(0)
        self._begins = self._file.tell()
        if note is not None and self.length:
            self._read_again(note, name=path.name)
        self._file.truncate(self._begins + self.length * dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        """Write the values behind those that are there."""
        if values.dtype != self._dtype:
            raise TypeError(f"{values.dtype} in an array of {self._dtype}")
        content = np.ascontiguousarray(values)
        self._file.write(content.data)
        if len(content):
            self._digests.update(content.data.cast("B"))
        self.length += len(content)

    def sync(self) -> None:
        """Make what has been written survive a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write the header; the array is whole."""
        self._file.seek(0)
        self._write_header(self.length)
        assert self._file.tell() == self._begins, "NumPy's header has outgrown its room"
        self.sync()

    def close(self) -> None:
        """Let go of the file; what was not synced may be lost."""
        with suppress(OSError):  # a full disk was met before, where it was told
            self._file.close()

    @property
    def note(self) -> ArrayNote:
        """Return what is to be known of it to go on from here."""
        return ArrayNote(self._dtype.str, self.length, self._digests.rolled)

    @property
    def facts(self) -> ArrayFacts:
        """Return what it can be verified against."""
        return ArrayFacts(dtype=self._dtype.str, length=self.length, digests=self._digests.digests.hex())

    def _read_again(self, note: ArrayNote, *, name: str) -> None:
        left = self.length * self._dtype.itemsize
        while left > 0:
            content = self._file.read(min(left, _PIECE_BYTES))
            if not content:
                raise ValueError(f"{name} is shorter than it was")
            self._digests.update(memoryview(content))
            left -= len(content)
        if self._digests.rolled != note.digest:
            raise ValueError(f"{name} does not hold what was written")

    def _write_header(self, length: int) -> None:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(self._file, described)


class GrowingArrays:
    """The arrays of a folder, by their names."""

    def __init__(self, folder: Path, notes: Mapping[str, ArrayNote]) -> None:
        self._folder = folder
        self._arrays = {
            name: GrowingArray(self._path(name), np.dtype(note.dtype), note=note) for name, note in notes.items()
        }

    def length(self, name: str) -> int | None:
        """Return how many values the array has, None where there is none of that name."""
        array = self._arrays.get(name)
        return None if array is None else array.length

    def stems(self, ending: str) -> list[str]:
        """Return the names that end so, without the ending, in the order in which the arrays were begun."""
        return [name.removesuffix(ending) for name in self._arrays if name.endswith(ending)]

    def append(self, name: str, values: np.ndarray) -> None:
        """Write the values behind those of the array, which is begun where it is not there yet."""
        if name not in self._arrays:
            self._arrays[name] = GrowingArray(self._path(name), values.dtype)
        self._arrays[name].append(values)

    def sync(self) -> dict[str, ArrayNote]:
        """Make all survive a power cut and return what is to be known of each."""
        for array in self._arrays.values():
            array.sync()
        return {name: array.note for name, array in self._arrays.items()}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the headers, and return what each array can be verified against; the arrays are whole."""
        for array in self._arrays.values():
            array.finish()
        return {name: array.facts.model_dump() for name, array in self._arrays.items()}

    def close(self) -> None:
        """Let go of the files."""
        for array in self._arrays.values():
            array.close()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"
