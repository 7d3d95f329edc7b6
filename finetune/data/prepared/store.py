"""The prepared set on disk: flat arrays that are memory-mapped, opened in no time whatever their size.

NAME.values.npy    the samples' array NAME, end to end
NAME.offsets.npy   where each sample begins in it, and the end: one more than there are samples
lengths.npy        tokens of each sample; num_targets.npy  targets of each
digests.npy        64 bits of the digest of each sample's tokens
row_numbers.npy    where its row stands in its origin
counts.json        what the set was made of, the names and origins in order, the counts of rows and tokens; written last
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from finetune.data.features import Features
from finetune.data.prepared.counts import Counts
from finetune.data.rows import place
from finetune.errors import DataError

FORMAT_VERSION = 2
MANIFEST = "counts.json"


@dataclass(frozen=True)
class Identity:
    """What a prepared set was made of: the fingerprint and the parts that it is a digest of."""

    fingerprint: str
    parts: Mapping[str, Any]
    shards: tuple[str, ...] = ()  # names of the files in order: they may change while the rows stay the same


class PreparedSet(Dataset[Features]):
    """Samples in the order of their rows, read from disk as they are asked for; safe to share with forked loaders.

    `shards` are the names that the files which it was made of have now, for messages.
    """

    def __init__(self, folder: Path, *, shards: Sequence[str] = ()) -> None:
        manifest = _read_manifest(folder)
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        self.shards = tuple(shards)
        self._now = dict(zip(manifest["shards"], shards, strict=False))  # from the name then to the name now
        self.counts = self._counts(manifest["counts"])
        self._values = {name: _open(folder / f"{name}.values.npy") for name in manifest["names"]}
        self._offsets = {name: _open(folder / f"{name}.offsets.npy") for name in manifest["names"]}
        self.lengths = _open(folder / "lengths.npy")
        self.num_targets_each = _open(folder / "num_targets.npy")
        self.digests = _open(folder / "digests.npy")
        self._row_numbers = _open(folder / "row_numbers.npy")
        self._origins: list[tuple[int, str]] = manifest["origins"]
        self._check()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        arrays = {
            name: values[self._offsets[name][index] : self._offsets[name][index + 1]]
            for name, values in self._values.items()
        }
        return Features(arrays, sample_id=int(index))

    def values(self, name: str) -> np.ndarray:
        """Return that array of all samples, end to end."""
        return self._values[name]

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return np.asarray(self.lengths[sample_ids], np.int64)

    def place(self, index: int) -> str:
        """Return where the row of the sample stands, in the file as it is named now."""
        run = bisect_right(self._origins, index, key=lambda origin: origin[0]) - 1
        origin = self._origins[run][1]
        return place(self._now.get(origin, origin), int(self._row_numbers[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.shards)  # another process maps the files anew: their content is not sent

    def _counts(self, values: dict[str, Any]) -> Counts:
        try:
            counts = Counts(**values)
        except TypeError as error:
            raise _damaged(self.folder, f"the counts in its {MANIFEST} are not ours") from error
        return replace(
            counts,
            longest_place=self._place_now(counts.longest_place),
            first_without_target=self._place_now(counts.first_without_target),
        )

    def _place_now(self, written: str) -> str:
        origin, comma, row = written.rpartition(",")
        return f"{self._now.get(origin, origin)}{comma}{row}"

    def _check(self) -> None:
        each = {"targets": self.num_targets_each, "digests": self.digests, "row numbers": self._row_numbers}
        for name, array in each.items():
            if len(array) != len(self):
                raise _damaged(self.folder, f"it has {len(self)} lengths and {len(array)} {name}")
        for name, offsets in self._offsets.items():
            if len(offsets) != len(self) + 1 or offsets[-1] != len(self._values[name]):
                raise _damaged(self.folder, f"{name} does not fit its offsets")


def _opened(folder: Path, shards: Sequence[str]) -> PreparedSet:
    return PreparedSet(folder, shards=shards)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        if version == FORMAT_VERSION:
            return {name: manifest[name] for name in ("fingerprint", "names", "counts", "origins", "shards")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"its {MANIFEST} cannot be read") from error
    raise _damaged(folder, f"it has version {version} of the format, this program reads {FORMAT_VERSION}")


def _open(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, f"{path.name} cannot be read: {error}") from error


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared set {folder} is damaged or not ours: {reason}. Delete that folder; it is made anew."
    )
