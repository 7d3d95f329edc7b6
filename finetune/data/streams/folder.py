"""A stream's folder in the cache: the windows that are at hand, and a small record of every one that ever was.

windows/000007/              the window's prepared set; deleted when it is behind
records/000007.lengths.npy   the tokens of each of its samples
records/000007.marks.npy     the mark of each of its samples: what they held can be compared when they are gone
records/000007.json          which rows it holds, what became of them, digests of all this; written last
damaged/000007-1f0a.../      a window, or `000007.json-...` a record, that was damaged and has been prepared again
readers/                     see `stream_readers.py`
maker.lock                   held by the process that prepares windows
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from uuid import uuid4

import numpy as np
import xxhash

from finetune.data.order.stream_plan import Cursor
from finetune.data.prepared.counts import Counts
from finetune.data.verified.damage import DamagedSet
from finetune.runtime.files import write_bytes
from finetune.runtime.sealed import Damaged, read_sealed, require_file, write_sealed

_VERSION = 2
_HIDDEN = "."


@dataclass(frozen=True)
class WindowRecord:
    """What remains of a window when its tokens are gone."""

    window: int
    start: Cursor
    next: Cursor  # where the following window begins
    counts: Counts
    lengths: np.ndarray  # tokens of each sample
    marks: np.ndarray  # uint64, of each sample

    def is_like(self, other: "WindowRecord") -> bool:
        """Tell whether both are of the same rows with the same content."""
        is_same = np.array_equal(self.lengths, other.lengths) and np.array_equal(self.marks, other.marks)
        return (self.start, self.next) == (other.start, other.next) and is_same


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

    def damaged(self) -> list[Path]:
        """Return the windows and records that were damaged, and have been or will be prepared again."""
        folder = self.path / "damaged"
        return sorted(folder.iterdir()) if folder.is_dir() else []

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
        digests = {}
        for name, array in (("lengths", record.lengths), ("marks", record.marks)):
            file = BytesIO()
            np.save(file, array)
            write_bytes(path.with_suffix(f".{name}.npy"), file.getvalue(), survives_power_cut=False)
            digests[name] = xxhash.xxh3_128_hexdigest(file.getvalue())
        parts = {"start": record.start, "next": record.next, "counts": asdict(record.counts), "digests": digests}
        write_sealed(path, {"version": _VERSION, **parts}, exact=True)

    def has_record(self, number: int) -> bool:
        """Tell whether the window has been prepared at some time."""
        return self._record(number).exists()

    def num_records(self) -> int:
        """Return how many windows, from the first on, have been prepared at some time."""
        return next(number for number in self._numbers() if not self.has_record(number))

    def read_record(self, number: int) -> WindowRecord:
        """Return the record; one that is damaged is set aside with its window, and DamagedSet raised.

        It is there again when the window has been prepared again.
        """
        path = self._record(number)
        try:
            value = read_sealed(path)
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']}")
            start, following, counts = Cursor(*value["start"]), Cursor(*value["next"]), Counts(**value["counts"])
            arrays = {name: _array(path, name, digest=digest) for name, digest in value["digests"].items()}
            return WindowRecord(number, start, following, counts, arrays["lengths"], arrays["marks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(path)
            self.set_window_aside(number)
            raise DamagedSet(path, str(error), title="the record") from error

    def set_window_aside(self, number: int) -> Path | None:
        """Rename a damaged window, so that it is prepared again; None where it is gone already."""
        return self._set_aside(self.window(number))

    def _set_aside(self, path: Path) -> Path | None:
        folder = self.path / "damaged"
        folder.mkdir(exist_ok=True)
        aside = folder / f"{path.name}-{uuid4().hex[:8]}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return None  # another process has done so
        return aside

    def _record(self, number: int) -> Path:
        return self.path / "records" / f"{_name(number)}.json"

    def _numbers(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def _name(number: int) -> str:
    return f"{number:06d}"


def _array(record: Path, name: str, *, digest: str) -> np.ndarray:
    path = record.with_suffix(f".{name}.npy")
    require_file(path)
    content = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise Damaged(f"{path.name} does not hold what was written")
    return np.asarray(np.load(BytesIO(content), allow_pickle=False))
