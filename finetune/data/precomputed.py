"""Arrays precomputed for each sample of a prepared set, such as reference log-probabilities or a teacher's top-k."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.data.features import Features
from finetune.data.token_cache.arrays import ArrayFacts, Verification, open_arrays
from finetune.data.token_cache.integrity import DamagedSet, sample_checksum, sample_checksums
from finetune.data.token_cache.journal import AppendableArrays, SyncedArray
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError
from finetune.runtime.files.atomic import fsync
from finetune.runtime.files.digests import Damaged, read_json_with_digest, write_json_with_digest

FORMAT_VERSION = 2
MANIFEST = "known.json"
_VALUES = ".values"


class PrecomputedManifest(BaseModel):
    """What `known.json` holds."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[2]
    names: tuple[str, ...]
    samples: int
    made_of: dict[str, Any]
    arrays: dict[str, ArrayFacts]


class PrecomputedArrays:
    """The arrays by sample, mapped from disk, verified but for the values; raises DamagedSet."""

    def __init__(self, folder: Path, *, is_verified: bool = False) -> None:
        self.folder = folder
        try:
            manifest = PrecomputedManifest.model_validate(read_json_with_digest(folder / MANIFEST))
            arrays = open_arrays(
                folder, manifest.arrays, verified=lambda name: not is_verified and not name.endswith(_VALUES)
            )
        except (Damaged, ValidationError) as error:
            raise DamagedSet(folder, str(error), title="the folder of precomputed arrays") from error
        self._num_samples = manifest.samples
        self._verification = Verification([arrays[f"{name}{_VALUES}"] for name in manifest.names])
        self._values = {name: arrays[f"{name}{_VALUES}"].values for name in manifest.names}
        self._offsets = {name: arrays[f"{name}.offsets"].values for name in manifest.names}
        self.checksums = arrays["marks"].values

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {
            name: values[self._offsets[name][index] : self._offsets[name][index + 1]]
            for name, values in self._values.items()
        }

    def verify(self) -> None:
        """Read all values once; raises DamagedSet unless they are as they were written."""
        self._verification.run()
        if self._verification.problem:
            raise DamagedSet(self.folder, self._verification.problem, title="the folder of precomputed arrays")


class PrecomputedSet(TokenCache):
    """A prepared set whose samples come with their precomputed arrays.

    Raises DataError where these are of another number of samples.
    """

    def __init__(
        self, folder: Path, precomputed: PrecomputedArrays, *, shards: Sequence[str] = (), is_verified: bool = False
    ) -> None:
        super().__init__(folder, shards=shards, is_verified=is_verified)
        self.precomputed = precomputed
        if len(precomputed) != len(self):
            raise DataError(
                f"{precomputed.folder} holds {len(precomputed)} samples, but the set {folder} has {len(self)}. Delete "
                f"{precomputed.folder}: it is then computed again."
            )

    def __getitem__(self, index: int) -> Features:
        features = super().__getitem__(index)
        return replace(features, arrays={**features.arrays, **self.precomputed[index]})

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum of the precomputed arrays of each sample."""
        return np.asarray(self.precomputed.checksums[sample_ids])

    def _stores(self, damaged: np.ndarray) -> list[tuple[Path, Callable[[], bool]]]:
        return [
            *super()._stores(damaged),
            (self.precomputed.folder, partial(_has_damaged, self.precomputed.folder, damaged)),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.precomputed.folder, self.shards)  # another process maps the files anew


def _has_damaged(folder: Path, sample_ids: np.ndarray) -> bool:
    """Tell whether the precomputed arrays of one of these samples are damaged in the files as they are now."""
    try:
        now = PrecomputedArrays(folder)
    except DamagedSet:
        return True
    marks = [sample_checksum(now[index]) for index in sample_ids.tolist()]
    return bool((np.array(marks, np.uint64) != now.checksums[sample_ids]).any())


def with_precomputed(prepared: TokenCache, folder: Path) -> PrecomputedSet:
    """Return the set with what the folder knows of its samples; raises DataError."""
    return PrecomputedSet(prepared.folder, PrecomputedArrays(folder), shards=prepared.shards)


class PrecomputedWriter:
    """Writes the precomputed arrays of sample after sample into an empty folder; raises OSError where it cannot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays = AppendableArrays(folder, {"marks": SyncedArray("<u8")})
        self._num_samples = 0

    def append(self, arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the 1-D arrays of the next samples; each has the same names."""
        if not arrays:
            return
        values = {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
        lengths = {name: np.array([len(each[name]) for each in arrays], np.int64) for name in arrays[0]}
        for name in arrays[0]:
            start = self._arrays.length(f"{name}.values")
            if start is None:
                start = 0
                self._arrays.append(f"{name}.offsets", np.zeros(1, np.int64))
            self._arrays.append(f"{name}.values", values[name])
            self._arrays.append(f"{name}.offsets", start + np.cumsum(lengths[name]))
        self._arrays.append("marks", sample_checksums(values, lengths, num_samples=len(arrays)))
        self._num_samples += len(arrays)

    def finish(self, made_of: Mapping[str, Any]) -> None:
        """Write what makes the folder whole."""
        names, arrays = self._arrays.stems(_VALUES), self._arrays.finish()
        counted = {"names": names, "samples": self._num_samples, "made_of": dict(made_of), "arrays": arrays}
        write_json_with_digest(self._folder / MANIFEST, {"version": FORMAT_VERSION, **counted})
        fsync(self._folder)

    def close(self) -> None:
        """Let go of the files."""
        self._arrays.close()


def _opened(folder: Path, precomputed: Path, shards: Sequence[str]) -> PrecomputedSet:
    return PrecomputedSet(folder, PrecomputedArrays(precomputed, is_verified=True), shards=shards, is_verified=True)
