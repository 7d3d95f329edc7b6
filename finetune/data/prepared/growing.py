"""Arrays on disk that grow, and that can be taken up again at a length that was noted."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


class GrowingArray:
    """An `.npy` file that is appended to; its header is right once `finish` has been called.

    With `length`, an existing file goes on from there, and what stands behind is cut off; raises ValueError where the
    file is not that long.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, length: int = 0) -> None:
        self.length = length
        self._dtype = dtype
        self._file: BinaryIO = path.open("r+b" if length else "wb")
        self._write_header(0)
        self._begins = self._file.tell()
        if self._file.seek(0, os.SEEK_END) < self._begins + length * dtype.itemsize:
            raise ValueError(f"{path} is shorter than it was")
        self._file.truncate(self._begins + length * dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        """Write the values behind those that are there."""
        if values.dtype != self._dtype:
            raise TypeError(f"{values.dtype} in an array of {self._dtype}")
        self._file.write(np.ascontiguousarray(values).data)
        self.length += len(values)

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
    def described(self) -> tuple[str, int]:
        """Return dtype and length as plain types."""
        return self._dtype.str, self.length

    def _write_header(self, length: int) -> None:
        described = {"descr": self.described[0], "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(self._file, described)


class GrowingArrays:
    """The arrays of a folder, by their names."""

    def __init__(self, folder: Path, described: Mapping[str, tuple[str, int]]) -> None:
        self._folder = folder
        self._arrays = {
            name: GrowingArray(self._path(name), np.dtype(dtype), length=length)
            for name, (dtype, length) in described.items()
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

    def sync(self) -> dict[str, tuple[str, int]]:
        """Make all survive a power cut and return dtype and length of each."""
        for array in self._arrays.values():
            array.sync()
        return {name: array.described for name, array in self._arrays.items()}

    def finish(self) -> None:
        """Write the headers; the arrays are whole."""
        for array in self._arrays.values():
            array.finish()

    def close(self) -> None:
        """Let go of the files."""
        for array in self._arrays.values():
            array.close()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"
