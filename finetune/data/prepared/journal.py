"""How far the making of a prepared set has come: lines, each a state to which its files can be taken back."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.prepared.counts import Counts
from finetune.data.prepared.growing import ArrayNote
from finetune.runtime.files import sync
from finetune.runtime.sealed import Damaged, opened, require_file, sealed

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Noted:
    """What is safely on the disk."""

    counts: Counts = field(default_factory=Counts)
    arrays: Mapping[str, ArrayNote] | None = None  # None: nothing is there yet
    origins: tuple[tuple[int, str], ...] = ()  # from which sample on the rows come from which origin


class Journal:
    """Notes how far a set has come; every line is on the disk before the next thing is done."""

    def __init__(self, folder: Path, *, head: str) -> None:
        """`head` names what is made: lines that begin with another one are those of something else."""
        self._path = folder / NAME
        self._head = head
        self._num_lines = 0

    def read(self) -> Noted:
        """Return the last state noted, and take out a line behind it that a kill has torn."""
        noted, end = Noted(), 0
        for line, read in _lines(self._path):
            if (line["head"], line["number"]) != (self._head, self._num_lines):
                break
            self._num_lines += 1
            origins = (*noted.origins, *((first, name) for first, name in line["origins"]))
            arrays = {name: ArrayNote(*note) for name, note in line["arrays"].items()}
            noted, end = Noted(Counts(**line["counts"]), arrays, origins), read
        if self._path.exists():
            os.truncate(self._path, end)
        return noted

    def note(self, noted: Noted, *, num_origins_noted: int) -> None:
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
            file.write(json.dumps(sealed(line)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._num_lines += 1
        if is_new:
            sync(self._path.parent)

    def remove(self) -> None:
        """Remove it: the set is whole."""
        self._num_lines = 0
        self._path.unlink(missing_ok=True)


def rows_noted(folder: Path) -> int:
    """Return how many rows the process that makes the set in this folder has behind it."""
    counts = [line["counts"]["rows"] for line, _ in _lines(folder / NAME)]
    return int(counts[-1]) if counts else 0


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every line up to the first that is torn or damaged, and the bytes up to its end."""
    end = 0
    for line in _content(path).splitlines(keepends=True):
        end += len(line)
        try:
            value = opened(json.loads(line))
        except (ValueError, RecursionError):
            return
        if line.endswith(b"\n"):
            yield value, end


def _content(path: Path) -> bytes:
    try:
        require_file(path)
        return path.read_bytes()
    except (OSError, Damaged):  # nothing was noted yet, or somebody else's set is whole by now, or it is no file
        return b""
