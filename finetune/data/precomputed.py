"""Arrays precomputed for each sample of a prepared set, such as reference log-probabilities or a teacher's top-k."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.data.features import Features
from finetune.data.token_cache.integrity import DamagedSet, sample_checksum, sample_checksums
from finetune.data.token_cache.samples import CHUNK_BYTES, SampleArrays, SampleWriter, StoredSamples
from finetune.data.token_cache.store import TokenCache
from finetune.errors import DataError
from finetune.runtime.files.digests import Damaged, read_json_with_digest, write_json_with_digest

FORMAT_VERSION = 3
MANIFEST = "known.json"
_COLUMNS = {"marks": "<u8"}
_MAX_SAMPLES_PER_FILE = 65_536


class PrecomputedManifest(BaseModel):
    """The content of `known.json`."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[3]
    names: tuple[str, ...]
    samples: int
    made_of: dict[str, Any]
    files: dict[str, str]  # digests of their contents


class PrecomputedArrays:
    """The arrays by sample, mapped from disk, verified except for the values; raises DamagedSet."""

    def __init__(self, folder: Path, *, is_verified: bool = False) -> None:
        self.folder = folder
        try:
            manifest = PrecomputedManifest.model_validate(read_json_with_digest(folder / MANIFEST))
            self._samples = StoredSamples(folder, manifest.files, manifest.names, is_verified=is_verified)
        except (Damaged, ValidationError) as error:
            raise DamagedSet(folder, str(error), title="the folder of precomputed arrays") from error
        self._num_samples = manifest.samples
        self.checksums = self._samples.columns["marks"]

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._samples[index]

    def verify(self) -> None:
        """Read all values once; raises DamagedSet if they have changed since they were written."""
        self._samples.verification.run()
        if problem := self._samples.verification.problem:
            raise DamagedSet(self.folder, problem, title="the folder of precomputed arrays")


class PrecomputedSet(TokenCache):
    """A prepared set whose samples include precomputed arrays; raises DataError if the numbers of samples differ."""

    def __init__(
        self, folder: Path, precomputed: PrecomputedArrays, *, shards: Sequence[str] = (), is_verified: bool = False
    ) -> None:
        super().__init__(folder, shards=shards, is_verified=is_verified)
        self.precomputed = precomputed
        if len(precomputed) != len(self):
            raise DataError(
                f"{precomputed.folder} has {len(precomputed)} samples, but the set {folder} has {len(self)}. Delete "
                f"{precomputed.folder}, and it will be computed again."
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
        return _reopen, (self.folder, self.precomputed.folder, self.shards)  # another process maps the files again


def _has_damaged(folder: Path, sample_ids: np.ndarray) -> bool:
    """Return whether the precomputed arrays of one of these samples are damaged in the current files."""
    try:
        current = PrecomputedArrays(folder)
    except DamagedSet:
        return True
    checksums = [sample_checksum(current[index]) for index in sample_ids.tolist()]
    return bool((np.array(checksums, np.uint64) != current.checksums[sample_ids]).any())


def with_precomputed(prepared: TokenCache, folder: Path) -> PrecomputedSet:
    """Return the set with the precomputed arrays in the folder; raises DataError."""
    return PrecomputedSet(prepared.folder, PrecomputedArrays(folder), shards=prepared.shards)


class PrecomputedWriter:
    """Writes the precomputed arrays of consecutive samples into an empty folder; raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = SampleWriter(folder, _COLUMNS)
        self._num_samples = 0
        self._num_pending = 0

    def append(self, arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Append the 1-D arrays of the next samples; all have the same names."""
        if not arrays:
            return
        values = {name: np.concatenate([sample[name] for sample in arrays]) for name in arrays[0]}
        lengths = {name: np.array([len(sample[name]) for sample in arrays], np.int64) for name in arrays[0]}
        checksums = sample_checksums(values, lengths, num_samples=len(arrays))
        self._writer.append(SampleArrays(values, lengths, {"marks": checksums}))
        self._num_pending += len(arrays)
        if self._num_pending >= _MAX_SAMPLES_PER_FILE or self._writer.pending_bytes >= CHUNK_BYTES:
            self._write_file()

    def finish(self, made_of: Mapping[str, Any]) -> None:
        """Write the remaining files, which complete the folder."""
        self._write_file()
        names, files = self._writer.finish()
        manifest = {
            "version": FORMAT_VERSION,
            "names": names,
            "samples": self._num_samples,
            "made_of": dict(made_of),
            "files": files,
        }
        write_json_with_digest(self._folder / MANIFEST, manifest)

    def _write_file(self) -> None:
        self._writer.write_chunk({})
        self._num_samples += self._num_pending
        self._num_pending = 0


def _reopen(folder: Path, precomputed: Path, shards: Sequence[str]) -> PrecomputedSet:
    return PrecomputedSet(folder, PrecomputedArrays(precomputed, is_verified=True), shards=shards, is_verified=True)
