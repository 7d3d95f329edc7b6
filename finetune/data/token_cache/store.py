"""A prepared set on disk as memory-mapped arrays, which open instantly at any size, and as a dataset view.

Arrays that are precomputed for its samples, such as reference log-probabilities, are in a folder of their own.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.config.sections.data import BatchingSection, DataSection
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, LengthGroupedOrder, Samples, fingerprint_of, set_order, token_budget
from finetune.data.rows import row_location
from finetune.data.token_cache.counts import LOCATIONS, Counts
from finetune.data.token_cache.integrity import DamagedSet, format_damage, sample_checksum, sample_checksums
from finetune.data.token_cache.samples import CHUNK_BYTES, SampleArrays, SampleWriter, StoredSamples
from finetune.errors import DataError
from finetune.runtime.files.digests import Damaged, read_json_with_digest, write_json_with_digest
from finetune.runtime.files.read import first_problem

CACHE_VERSION = 6
"""Increased when rows are encoded, identified or stored differently; sets of other versions are prepared again."""

MANIFEST = "counts.json"
MAX_NAMED = 16
"""The maximum number of damaged rows that a message names."""

_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class Identity:
    """The inputs of a prepared set: the fingerprint and the values it is a digest of."""

    fingerprint: str
    parts: Mapping[str, Any]
    shards: tuple[str, ...] = ()  # file names in order, which may change while the rows stay the same


class TokenCacheManifest(BaseModel):
    """The content of `counts.json`."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[6]
    fingerprint: str
    names: tuple[str, ...]
    counts: dict[str, Any]
    origins: list[tuple[int, str]]
    shards: tuple[str, ...]
    made_of: dict[str, Any]
    files: dict[str, str]  # digests of their contents


class TokenCache(Samples):
    """Samples in the order of their rows, read from disk on access; safe to share with forked loaders.

    `shards` are the current names of its source files, for messages. Samples include the `precomputed` arrays. The
    index (lengths, targets, checksums) is verified here unless another process has done so (`is_verified`); `verify`
    verifies the samples. Raises DamagedSet, and DataError if the number of precomputed samples differs.
    """

    def __init__(
        self,
        folder: Path,
        precomputed: "PrecomputedArrays | None" = None,
        *,
        shards: Sequence[str] = (),
        is_verified: bool = False,
    ) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self.precomputed = precomputed
        try:
            manifest = TokenCacheManifest.model_validate(read_json_with_digest(folder / MANIFEST))
            self.stored = StoredSamples(folder, manifest.files, manifest.names, is_verified=is_verified)
        except Damaged as damage:
            raise DamagedSet(folder, str(damage)) from damage
        except ValidationError as error:
            raise DamagedSet(folder, f"{MANIFEST}: {first_problem(error)}") from error
        self.fingerprint, self._origins = manifest.fingerprint, manifest.origins
        self.lengths = self.stored.columns["lengths"]
        self.num_targets_each = self.stored.columns["num_targets"]
        self.digests = self.stored.columns["digests"]
        self.checksums = self.stored.columns["marks"]
        self._row_numbers = self.stored.columns["row_numbers"]
        self._current_names = dict(zip(manifest.shards, self.shards, strict=False))  # by the names when it was built
        counts = dict(manifest.counts)
        for name in LOCATIONS:
            origin, comma, row = counts.get(name, "").rpartition(",")
            counts[name] = f"{self._current_names.get(origin, origin)}{comma}{row}"
        self.counts = Counts.read(counts)
        if precomputed is not None and precomputed.num_samples != len(self):
            raise DataError(
                f"{precomputed.folder} has {precomputed.num_samples} samples, but the set {folder} has {len(self)}. "
                f"Delete {precomputed.folder}, and it will be computed again."
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        precomputed = {} if self.precomputed is None else self.precomputed.stored[index]
        return Features({**self.stored[index], **precomputed}, sample_id=int(index))

    def intact(self, index: int) -> Features:
        """Return the sample after verifying its checksum; raises DamagedSet."""
        features, ids = self[index], np.array([index])
        (own,), (precomputed,) = self.checksums_of(ids), self.precomputed_checksums_of(ids)
        if sample_checksum(features.arrays) != (int(own) + int(precomputed)) & _BITS:
            raise DamagedSet(self.folder, f"{self.location(index)} differs from the prepared sample")
        return features

    def verify(self) -> None:
        """Read the samples' arrays once; raises DamagedSet if they have changed since they were written."""
        try:
            self.stored.verify()
        except Damaged as damage:
            raise DamagedSet(self.folder, str(damage)) from damage

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample."""
        return np.asarray(self.lengths[sample_ids], np.int64)

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's own arrays, computed when it was encoded."""
        return np.asarray(self.checksums[sample_ids])

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's precomputed arrays; 0 without such arrays."""
        if self.precomputed is None:
            return np.zeros(len(sample_ids), np.uint64)
        return np.asarray(self.precomputed.checksums[sample_ids])

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about samples that the loader delivered damaged.

        A set that is also damaged on disk has been quarantined when this returns.
        """
        locations = [self.location(index) for index in damaged[:MAX_NAMED].tolist()]
        more = f" and {len(damaged) - MAX_NAMED:,} more" if len(damaged) > MAX_NAMED else ""
        damage = f"{'; '.join(locations)}{more}: differs from the prepared sample in {self.folder}"
        stores = [(self.folder, partial(_has_damaged, partial(TokenCache, self.folder), damaged))]
        if self.precomputed is not None:
            folder = self.precomputed.folder
            stores.append((folder, partial(_has_damaged, partial(PrecomputedArrays, folder), damaged)))
        return format_damage(damage, stores)

    def location(self, index: int) -> str:
        """Return the location of the sample's row for messages, with the current name of its file."""
        run = bisect_right(self._origins, index, key=lambda origin: origin[0]) - 1
        origin = self._origins[run][1]
        return row_location(self._current_names.get(origin, origin), int(self._row_numbers[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        # another process maps the files again: their content is not sent
        return partial(TokenCache, shards=self.shards, is_verified=True), (self.folder, self.precomputed)


def _has_damaged(reopen: "Callable[[], TokenCache | PrecomputedArrays]", sample_ids: np.ndarray) -> bool:
    """Return whether the own or the precomputed arrays of one of these samples are damaged in the current files."""
    try:
        current = reopen()
    except DamagedSet:
        return True
    checksums = [sample_checksum(current.stored[index]) for index in sample_ids.tolist()]
    return bool((np.array(checksums, np.uint64) != current.checksums[sample_ids]).any())


def dataset_view(prepared: TokenCache, section: DataSection, *, seed: int, key: str) -> DatasetView:
    """Return the set's samples in an order derived from the seed; `key` is the source's key in the job YAML."""
    batching, max_length = section.batching, section.longest
    order = set_order(prepared.lengths, seed=seed, shuffle=section.shuffle, batching=batching, max_length=max_length)
    epoch_tokens = int(prepared.lengths.sum())
    content = prepared.fingerprint
    if prepared.counts.control_rows:  # older versions encoded such rows differently, so their checkpoints are refused
        content = fingerprint_of(content, "names of control tokens are text")
    if batching.by == "samples":
        return DatasetView(prepared, order, content, epoch_tokens)
    budget = token_budget(batching, max_length=max_length)
    num_groups = order.num_positions or 0
    share = epoch_tokens / (num_groups * budget) if num_groups else 0.0
    groups = f"{num_groups:,} {batching.unit} of at most {budget:,}: {share:.1%} full"
    lines = (f"{key}: {epoch_tokens:,} tokens in {groups}",)
    fingerprint = fingerprint_of(content, batching.by, budget)
    return DatasetView(prepared, order, fingerprint, epoch_tokens, lambda num_positions: lines)


def grouped_by_length(
    view: DatasetView, batching: BatchingSection, *, seed: int, global_batch_size: int
) -> DatasetView:
    """Return the view with its samples sorted by length within windows of `batching.length_window_steps` steps.

    The view is returned unchanged for 0 and for `auto`, which the caller has resolved.
    """
    steps = batching.length_window_steps
    if steps == "auto" or steps == 0:
        return view
    order = LengthGroupedOrder(
        view.order, view.samples.lengths_of, seed=seed, global_batch_size=global_batch_size, window_steps=steps
    )
    fingerprint = view.fingerprint if steps == 1 else fingerprint_of(view.fingerprint, "by length", steps)
    return DatasetView(view.samples, order, fingerprint, view.epoch_tokens, view.lines)


PRECOMPUTED_MANIFEST = "known.json"
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
            manifest = PrecomputedManifest.model_validate(read_json_with_digest(folder / PRECOMPUTED_MANIFEST))
            self.stored = StoredSamples(folder, manifest.files, manifest.names, is_verified=is_verified)
        except (Damaged, ValidationError) as error:
            raise DamagedSet(folder, str(error), title="the folder of precomputed arrays") from error
        self.num_samples = manifest.samples
        self.checksums = self.stored.columns["marks"]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PrecomputedArrays, is_verified=True), (self.folder,)  # another process maps the files again

    def verify(self) -> None:
        """Read all values once; raises DamagedSet if they have changed since they were written."""
        try:
            self.stored.verify()
        except Damaged as damage:
            raise DamagedSet(self.folder, str(damage), title="the folder of precomputed arrays") from damage


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
        self._num_samples += len(arrays)
        self._num_pending += len(arrays)
        if self._num_pending >= _MAX_SAMPLES_PER_FILE or self._writer.pending_bytes >= CHUNK_BYTES:
            self._writer.write_chunk({})
            self._num_pending = 0

    def finish(self, made_of: Mapping[str, Any]) -> None:
        """Write the remaining files, which complete the folder."""
        self._writer.write_chunk({})
        names, files = self._writer.finish()
        manifest = {
            "version": 3,
            "names": names,
            "samples": self._num_samples,
            "made_of": dict(made_of),
            "files": files,
        }
        write_json_with_digest(self._folder / PRECOMPUTED_MANIFEST, manifest)
