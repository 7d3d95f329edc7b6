"""What is known of each sample of a prepared set beforehand, from a model that does not learn.

NAME.values.npy    the array NAME of every sample, end to end
NAME.offsets.npy   where each sample begins in it, and the end
known.json         the names in order, what it was worked out from, how many samples; written last
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.features import Features
from finetune.data.prepared.growing import GrowingArrays
from finetune.data.prepared.store import PreparedSet
from finetune.errors import DataError
from finetune.runtime.files import sync, write_json

FORMAT_VERSION = 1
MANIFEST = "known.json"


class KnownArrays:
    """The arrays by sample, mapped from disk; raises DataError for a folder that is damaged or not ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != FORMAT_VERSION:
                raise ValueError(f"version {manifest['version']}")
            self._num_samples: int = manifest["samples"]
            self._values = {name: _mapped(folder / f"{name}.values.npy") for name in manifest["names"]}
            self._offsets = {name: _mapped(folder / f"{name}.offsets.npy") for name in manifest["names"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder} is damaged or not ours: {error}. Delete it; it is made anew.") from error
        if any(len(offsets) != len(self) + 1 for offsets in self._offsets.values()):
            raise DataError(f"{folder} is damaged: its arrays do not fit. Delete it; it is made anew.")

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {
            name: values[self._offsets[name][index] : self._offsets[name][index + 1]]
            for name, values in self._values.items()
        }


class KnownSet(PreparedSet):
    """A prepared set whose samples deliver what is known of them beside their own arrays.

    Raises DataError where what is known is of another number of samples.
    """

    def __init__(self, folder: Path, known: KnownArrays, *, shards: Sequence[str] = ()) -> None:
        super().__init__(folder, shards=shards)
        self._known = known
        if len(known) != len(self):
            raise DataError(
                f"{known.folder} knows of {len(known)} samples, the set {folder} has {len(self)}. Delete it; it is "
                "made anew."
            )

    def __getitem__(self, index: int) -> Features:
        features = super().__getitem__(index)
        return replace(features, arrays={**features.arrays, **self._known[index]})

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self._known.folder, self.shards)  # another process maps the files anew


def known_set(prepared: PreparedSet, folder: Path) -> KnownSet:
    """Return the set with what the folder knows of its samples; raises DataError."""
    return KnownSet(prepared.folder, KnownArrays(folder), shards=prepared.shards)


class KnownWriter:
    """Writes what is known of sample after sample into an empty folder; raises OSError where it cannot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays = GrowingArrays(folder, {})
        self._num_samples = 0

    def append(self, known: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the 1-D arrays of the next samples; each has the same names."""
        if not known:
            return
        for name in known[0]:
            values = np.concatenate([each[name] for each in known])
            start = self._arrays.length(f"{name}.values")
            if start is None:
                start = 0
                self._arrays.append(f"{name}.offsets", np.zeros(1, np.int64))
            self._arrays.append(f"{name}.values", values)
            lengths = [len(each[name]) for each in known]
            self._arrays.append(f"{name}.offsets", start + np.cumsum(lengths, dtype=np.int64))
        self._num_samples += len(known)

    def finish(self, made_of: Mapping[str, Any]) -> None:
        """Write what makes the folder whole."""
        self._arrays.finish()
        names = self._arrays.stems(".values")
        manifest = {"version": FORMAT_VERSION, "names": names, "samples": self._num_samples, "made_of": dict(made_of)}
        write_json(self._folder / MANIFEST, manifest)
        sync(self._folder)

    def close(self) -> None:
        """Let go of the files."""
        self._arrays.close()


def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _opened(folder: Path, known: Path, shards: Sequence[str]) -> KnownSet:
    return KnownSet(folder, KnownArrays(known), shards=shards)
