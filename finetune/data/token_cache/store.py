"""The prepared set on disk: flat memory-mapped arrays, opened at once whatever their size, as a dataset view."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.utils.data import Dataset

from finetune.config.sections.data import BatchingSection, DataSection
from finetune.data.features import Features
from finetune.data.order.dataset_view import DatasetView, fingerprint_of
from finetune.data.order.grouping import LengthGroupedOrder, set_order, tokens_per_position
from finetune.data.order.order import Order
from finetune.data.rows import row_location
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.integrity import DamagedSet, format_damage, sample_checksum
from finetune.data.token_cache.samples import StoredSamples
from finetune.errors import DataError
from finetune.runtime.files.digests import Damaged, read_json_with_digest

FORMAT_VERSION = 4
MANIFEST = "counts.json"
MAX_NAMED = 16
"""Rows that a message names of those that are damaged."""

_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class Identity:
    """What a prepared set was made of: the fingerprint and the parts that it is a digest of."""

    fingerprint: str
    parts: Mapping[str, Any]
    shards: tuple[str, ...] = ()  # names of the files in order: they may change while the rows stay the same


class TokenCacheManifest(BaseModel):
    """What `counts.json` holds."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[4]
    fingerprint: str
    names: tuple[str, ...]
    counts: dict[str, Any]
    origins: list[tuple[int, str]]
    shards: tuple[str, ...]
    made_of: dict[str, Any]
    files: dict[str, str]  # digests of their contents


class TokenCache(Dataset[Features]):
    """Samples in the order of their rows, read from disk as they are asked for; safe to share with forked loaders.

    `shards` are the names that the files which it was made of have now, for messages. What order and batches follow
    from is verified here, unless another process has done so; the samples themselves by `verify`, or by `verification`
    in the background. Raises DamagedSet.
    """

    def __init__(self, folder: Path, *, shards: Sequence[str] = (), is_verified: bool = False) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self.remake: Callable[[TokenCache], TokenCache] | None = None  # sets the folder aside where it is damaged
        try:
            self._open(_read_manifest(folder), is_verified=is_verified)
        except Damaged as damage:
            raise DamagedSet(folder, str(damage)) from damage

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return Features(self._samples[index], sample_id=int(index))

    def intact(self, index: int) -> Features:
        """Return the sample, compared with its mark; raises DamagedSet."""
        features = self[index]
        (own,), (known,) = self.checksums_of(np.array([index])), self.precomputed_checksums_of(np.array([index]))
        if sample_checksum(features.arrays) != (int(own) + int(known)) & _BITS:
            raise DamagedSet(self.folder, f"{self.place(index)} is not what was prepared")
        return features

    def verify(self) -> None:
        """Read the samples' arrays once; raises DamagedSet unless they are as they were written."""
        self.verification.run()
        if self.verification.problem:
            raise DamagedSet(self.folder, self.verification.problem)

    def pieces(self, name: str) -> list[np.ndarray]:
        """Return that array of all samples, end to end, in pieces that are memory-mapped."""
        return self._samples.pieces(name)

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return np.asarray(self.lengths[sample_ids], np.int64)

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample as it was written."""
        return np.asarray(self.checksums[sample_ids])

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum of the arrays that are delivered with each sample in addition to its own: of none."""
        return np.zeros(len(sample_ids), np.uint64)

    def problem(self) -> str | None:
        """Return the damage that the verification has found so far."""
        problem = self.verification.problem
        return None if problem is None else str(DamagedSet(self.folder, problem))

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages on samples that were delivered damaged, or else on the `problem`.

        What is damaged on disk, too, is set aside by then.
        """
        what = self.problem() or ""
        if len(damaged):
            locations = [self.place(index) for index in damaged[:MAX_NAMED].tolist()]
            more = f" and {len(damaged) - MAX_NAMED:,} more" if len(damaged) > MAX_NAMED else ""
            what = f"{'; '.join(locations)}{more}: not what was prepared in {self.folder}"
        return format_damage(what, self._stores(damaged))

    def is_still_damaged(self) -> bool:
        """Return whether the files that are there now have the damage that the verification of these has found."""
        try:
            now = TokenCache(self.folder)
            now.verification.verify_block(self.verification.damaged_block)
        except (DamagedSet, Damaged):
            return True
        return False

    def reopen(self, other: "TokenCache") -> None:
        """Read from another copy's files from now on; raises DataError where that one holds other samples."""
        if other.files != self.files:
            raise DataError(f"the prepared set {self.folder} was rebuilt with other content. Start the run again.")
        self.__dict__.update(vars(other))

    def place(self, index: int) -> str:
        """Return the location of the sample's row, in the file as it is named now."""
        run = bisect_right(self._origins, index, key=lambda origin: origin[0]) - 1
        origin = self._origins[run][1]
        return row_location(self._now.get(origin, origin), int(self._row_numbers[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.shards)  # another process maps the files again: their content is not sent

    def _stores(self, damaged: np.ndarray) -> list[tuple[Path, Callable[[], bool]]]:
        """Return the folders that samples come from, with what tells whether they are damaged in these samples."""
        if not len(damaged):
            return [(self.folder, self.is_still_damaged)]
        return [(self.folder, partial(_has_damaged, self.folder, damaged))]

    def _open(self, manifest: TokenCacheManifest, *, is_verified: bool) -> None:
        self.fingerprint = manifest.fingerprint
        self._now = dict(zip(manifest.shards, self.shards, strict=False))  # from the name then to the name now
        self.counts = self._counts(manifest.counts)
        self.files = manifest.files
        self._samples = StoredSamples(self.folder, manifest.files, manifest.names, is_verified=is_verified)
        self.verification = self._samples.verification
        self.lengths = self._samples.columns["lengths"]
        self.num_targets_each = self._samples.columns["num_targets"]
        self.digests = self._samples.columns["digests"]
        self.checksums = self._samples.columns["marks"]
        self._row_numbers = self._samples.columns["row_numbers"]
        self._origins = manifest.origins

    def _counts(self, values: dict[str, Any]) -> Counts:
        counts = Counts(**values)
        return replace(
            counts,
            longest_place=self._place_now(counts.longest_place),
            first_without_target=self._place_now(counts.first_without_target),
        )

    def _place_now(self, written: str) -> str:
        origin, comma, row = written.rpartition(",")
        return f"{self._now.get(origin, origin)}{comma}{row}"


def _has_damaged(folder: Path, sample_ids: np.ndarray) -> bool:
    """Return whether one of these samples is damaged in the files that stand there now."""
    try:
        now = TokenCache(folder)
    except DamagedSet:
        return True
    marks = [sample_checksum(now[index].arrays) for index in sample_ids.tolist()]
    return bool((np.array(marks, np.uint64) != now.checksums_of(sample_ids)).any())


def _opened(folder: Path, shards: Sequence[str]) -> TokenCache:
    return TokenCache(folder, shards=shards, is_verified=True)


def _read_manifest(folder: Path) -> TokenCacheManifest:
    try:
        return TokenCacheManifest.model_validate(read_json_with_digest(folder / MANIFEST))
    except ValidationError as error:
        first = error.errors()[0]
        raise Damaged(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def dataset_view(prepared: TokenCache, section: DataSection, *, seed: int, key: str) -> DatasetView:
    """Return the set's samples in an order drawn from the seed; `key` is the source's place in the job YAML."""
    batching, max_length = section.batching, section.longest
    order = set_order(prepared.lengths, seed=seed, shuffle=section.shuffle, batching=batching, max_length=max_length)
    epoch_tokens = int(prepared.lengths.sum())
    if batching.by == "samples":
        return DatasetView(prepared, order, _content(prepared), epoch_tokens)
    budget = tokens_per_position(batching, max_length=max_length)
    lines = partial(_describe_order, order, key=key, unit=batching.unit, budget=budget, epoch_tokens=epoch_tokens)
    fingerprint = fingerprint_of(_content(prepared), batching.by, budget)
    return DatasetView(prepared, order, fingerprint, epoch_tokens, lines)


def _content(prepared: TokenCache) -> str:
    """Return the fingerprint of the samples: another one where names of control tokens in rows were made plain text.

    Sets from before that was done have none of these rows, or other samples; a checkpoint is refused for those alone.
    """
    if prepared.counts.control_rows == 0:
        return prepared.fingerprint
    return fingerprint_of(prepared.fingerprint, "names of control tokens are text")


def grouped_by_length(
    view: DatasetView, batching: BatchingSection, *, seed: int, global_batch_size: int
) -> DatasetView:
    """Return the view with its samples sorted by length within as many steps as the section says, if any.

    `auto` has been resolved before; here it sorts nothing.
    """
    steps = batching.length_window_steps
    if steps == "auto" or steps == 0:
        return view
    order = LengthGroupedOrder(
        view.order, view.samples.lengths_of, seed=seed, global_batch_size=global_batch_size, window_steps=steps
    )
    fingerprint = view.fingerprint if steps == 1 else fingerprint_of(view.fingerprint, "by length", steps)
    return DatasetView(view.samples, order, fingerprint, view.epoch_tokens, view.lines)


def _describe_order(
    order: Order, num_positions: int, *, key: str, unit: str, budget: int, epoch_tokens: int
) -> tuple[str, ...]:
    """Return how many groups an epoch has and how full they are."""
    num_groups = order.num_positions or 0
    share = epoch_tokens / (num_groups * budget) if num_groups else 0.0
    return (f"{key}: {epoch_tokens:,} tokens in {num_groups:,} {unit} of at most {budget:,}: {share:.1%} full",)
