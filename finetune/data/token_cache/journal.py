"""Appendable arrays and the journal of how far a prepared set has been written: it is resumed from there."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from finetune.data.token_cache.arrays import ArrayFacts
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import BlockDigests
from finetune.runtime.files.atomic import fsync
from finetune.runtime.files.digests import Damaged, check_digest, require_undamaged_file, with_digest

_PIECE_BYTES = 1 << 20


class SyncedArray(NamedTuple):
    """What an array was when it was last brought to the disk."""

    dtype: str
    length: int = 0
    digest: str = ""  # of all its values


class AppendableArray:
    """An `.npy` file that is appended to; its header is right once `finish` has been called.

    With a note, an existing file goes on from there, and what stands behind is cut off; raises ValueError where the
    file is not that long, or does not hold what it held.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, note: SyncedArray | None = None) -> None:
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
    def note(self) -> SyncedArray:
        """Return what is to be known of it to go on from here."""
        return SyncedArray(self._dtype.str, self.length, self._digests.rolled)

    @property
    def facts(self) -> ArrayFacts:
        """Return what it can be verified against."""
        return ArrayFacts(dtype=self._dtype.str, length=self.length, digests=self._digests.digests.hex())

    def _read_again(self, note: SyncedArray, *, name: str) -> None:
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


class AppendableArrays:
    """The arrays of a folder, by their names."""

    def __init__(self, folder: Path, notes: Mapping[str, SyncedArray]) -> None:
        self._folder = folder
        self._arrays = {
            name: AppendableArray(self._path(name), np.dtype(note.dtype), note=note) for name, note in notes.items()
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
            self._arrays[name] = AppendableArray(self._path(name), values.dtype)
        self._arrays[name].append(values)

    def sync(self) -> dict[str, SyncedArray]:
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


NAME = "journal.jsonl"


@dataclass(frozen=True)
class JournalState:
    """What is safely on the disk."""

    counts: Counts = field(default_factory=Counts)
    arrays: Mapping[str, SyncedArray] | None = None  # None: nothing is there yet
    origins: tuple[tuple[int, str], ...] = ()  # from which sample on the rows come from which origin


class Journal:
    """Notes how far a set has come; every line is on the disk before the next thing is done."""

    def __init__(self, folder: Path, *, head: str) -> None:
        """`head` names what is made: lines that begin with another one are those of something else."""
        self._path = folder / NAME
        self._head = head
        self._num_lines = 0

    def read(self) -> JournalState:
        """Return the last state noted, and take out a line behind it that a kill has torn."""
        noted, end = JournalState(), 0
        for line, read in _lines(self._path):
            if (line["head"], line["number"]) != (self._head, self._num_lines):
                break
            self._num_lines += 1
            origins = (*noted.origins, *((first, name) for first, name in line["origins"]))
            arrays = {name: SyncedArray(*note) for name, note in line["arrays"].items()}
            noted, end = JournalState(Counts(**line["counts"]), arrays, origins), read
        if self._path.exists():
            os.truncate(self._path, end)
        return noted

    def note(self, noted: JournalState, *, num_origins_noted: int) -> None:
        """Add a line; the origins noted before are not repeated."""
        is_new = not self._path.exists()
        line = {
            "head": self._head,
            "number": self._num_lines,
            "counts": asdict(noted.counts),
            "arrays": noted.arrays,
            "origins": noted.origins[num_origins_noted:],
        }
        with self._path.open("ab") as file:
            file.write(json.dumps(with_digest(line)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._num_lines += 1
        if is_new:
            fsync(self._path.parent)

    def remove(self) -> None:
        """Remove it: the set is whole."""
        self._num_lines = 0
        self._path.unlink(missing_ok=True)


def num_journaled_rows(folder: Path) -> int:
    """Return how many rows the process that makes the set in this folder has behind it."""
    counts = [line["counts"]["rows"] for line, _ in _lines(folder / NAME)]
    return int(counts[-1]) if counts else 0


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every line up to the first that is torn or damaged, and the bytes up to its end."""
    end = 0
    for line in _content(path).splitlines(keepends=True):
        end += len(line)
        try:
            value = check_digest(json.loads(line))
        except (ValueError, RecursionError):
            return
        if line.endswith(b"\n"):
            yield value, end


def _content(path: Path) -> bytes:
    try:
        require_undamaged_file(path)
        return path.read_bytes()
    except (OSError, Damaged):  # nothing was noted yet, or somebody else's set is whole by now, or it is no file
        return b""
