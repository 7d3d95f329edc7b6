"""A stream's folder in the cache: the windows that are at hand, and a small record of every one that ever was.

windows/000007/              the window's prepared set; deleted when it is behind
records/000007.lengths.npy   the tokens of each of its samples
records/000007.json          which rows it holds and what became of them; written last
readers/                     see `stream_readers.py`
maker.lock                   held by the process that prepares windows
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from finetune.data.order.stream_plan import Cursor
from finetune.data.prepared.counts import Counts
from finetune.errors import DataError
from finetune.runtime.files import write_json
from finetune.runtime.json_files import read_json

_VERSION = 1
_HIDDEN = "."


@dataclass(frozen=True)
class WindowRecord:
    """What remains of a window when its tokens are gone."""

    window: int
    start: Cursor
    next: Cursor  # where the following window begins
    counts: Counts
    lengths: np.ndarray  # tokens of each sample

    def is_like(self, other: "WindowRecord") -> bool:
        """Tell whether both are of the same rows with the same lengths."""
        return (self.start, self.next) == (other.start, other.next) and np.array_equal(self.lengths, other.lengths)


@dataclass(frozen=True)
class StreamFolder:
    """The folder of one stream; every entry in it appears whole or not at all."""

    path: Path

    @property
    def lock(self) -> Path:
        """Return the file that the process holds which prepares windows."""
        return self.path / "maker.lock"

    @property
    def readers(self) -> Path:
        """Return where processes ask for windows."""
        return self.path / "readers"

    @property
    def sign_of_life(self) -> Path:
        """Return the file whose time moves on as rows are prepared."""
        return self.path / "maker.alive"

    def make(self) -> None:
        """Make the folder and those in it."""
        for name in ("windows", "records", "readers"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def window(self, number: int) -> Path:
        """Return where the window's prepared set is, or would be."""
        return self.path / "windows" / _name(number)

    def windows(self) -> set[int]:
        """Return the windows that are at hand."""
        return {int(path.name) for path in (self.path / "windows").glob(f"[!{_HIDDEN}]*")}

    def staging(self, number: int) -> Path:
        """Return a new folder in which the window may be prepared."""
        path = self.path / "windows" / f"{_HIDDEN}{_name(number)}.{uuid4().hex[:8]}"
        path.mkdir()
        return path

    def delete_window(self, number: int) -> None:
        """Delete the window's tokens; whoever has mapped them already may go on reading."""
        gone = self.staging(number)
        self.window(number).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def delete_leftovers(self) -> None:
        """Delete what a process that was killed has left half prepared or half deleted."""
        for path in (self.path / "windows").glob(f"{_HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)

    def write_record(self, record: WindowRecord) -> None:
        """Write the record, which is never deleted."""
        path = self._record(record.window)
        with path.with_suffix(".lengths.npy").open("wb") as file:
            np.save(file, record.lengths)
        parts = {"start": record.start, "next": record.next, "counts": asdict(record.counts)}
        write_json(path, {"version": _VERSION, **parts})

    def has_record(self, number: int) -> bool:
        """Tell whether the window has been prepared at some time."""
        return self._record(number).exists()

    def num_records(self) -> int:
        """Return how many windows, from the first on, have been prepared at some time."""
        return next(number for number in self._numbers() if not self.has_record(number))

    def read_record(self, number: int) -> WindowRecord:
        """Return the record; raises DataError where it cannot be read."""
        path = self._record(number)
        try:
            value = read_json(path)
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']}")
            start, following, counts = Cursor(*value["start"]), Cursor(*value["next"]), Counts(**value["counts"])
            lengths = np.load(path.with_suffix(".lengths.npy"), allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is damaged or not ours ({error}). Delete the folder {self.path}; the stream is prepared anew."
            ) from error
        return WindowRecord(number, start, following, counts, lengths)

    def _record(self, number: int) -> Path:
        return self.path / "records" / f"{_name(number)}.json"

    def _numbers(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def _name(number: int) -> str:
    return f"{number:06d}"
