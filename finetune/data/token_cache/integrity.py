"""Checksums of samples: in files, in the loader's batches, and of all that a run consumed; damage is quarantined."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, Order, Samples
from finetune.errors import DataError
from finetune.runtime.files.atomic import quarantine
from finetune.runtime.optional import no_op

_BITS = (1 << 64) - 1


def sample_checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the checksum of the names, types and values of a sample's arrays.

    >>> both = sample_checksum({"a": np.arange(3), "b": np.arange(2)})
    >>> both == (sample_checksum({"a": np.arange(3)}) + sample_checksum({"b": np.arange(2)})) % 2**64
    True
    """
    return sum(_array_checksum(name, array) for name, array in arrays.items()) & _BITS


def sample_checksums(
    values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], *, num_samples: int
) -> np.ndarray:
    """Return the checksums (uint64) of samples that are concatenated in the arrays."""
    total = np.zeros(num_samples, np.uint64)
    for name, array in values.items():
        ends = accumulate(lengths[name].tolist(), initial=0)
        total += np.array([_array_checksum(name, array[start:stop]) for start, stop in pairwise(ends)], np.uint64)
    return total


def _array_checksum(name: str, array: Any) -> int:
    return xxhash.xxh3_64_intdigest(array, _seed(name, array.dtype))


@lru_cache(maxsize=256)
def _seed(name: str, dtype: np.dtype[Any]) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {dtype.str}".encode())


class DamagedSet(DataError):
    """A prepared set has changed on disk since it was written."""

    def __init__(self, folder: Path, reason: str, *, title: str = "the prepared set") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{title} {folder} is damaged: {reason}")


def quarantine_set(folder: Path, is_damaged: Callable[[], bool], *, log: Callable[[str], None]) -> Path | None:
    """Rename the folder if it is still damaged and return the new path; None if another process has done so.

    Raises DataError if it cannot be renamed, as in a read-only cache.
    """
    try:
        return quarantine(folder, is_damaged, log=log)
    except OSError as error:
        raise DataError(
            f"{folder} is damaged and cannot be renamed: {error.strerror or error}. Set data.cache_folder to a "
            "writable folder, or ask the owner of this one to delete the damaged set; it is then rebuilt."
        ) from error


def format_damage(damage: str, stores: Iterable[tuple[Path, Callable[[], bool]]]) -> tuple[str, ...]:
    """Return messages about damaged data that was delivered from these folders.

    Each folder comes with a function that checks whether it is damaged on disk; if it is, it is quarantined.
    """
    remedy = "Run the same command again: it rebuilds the set and resumes from the last checkpoint."
    quarantines = []
    for folder, is_damaged in stores:
        try:
            quarantined = quarantine_set(folder, is_damaged, log=no_op)
        except DataError as error:
            quarantines.append(str(error))
            continue
        if quarantined is not None:
            quarantines.append(f"{folder} is damaged and was renamed to {quarantined.name}. {remedy}")
        elif not folder.exists():
            quarantines.append(f"{folder} was damaged and renamed by another process. {remedy}")
    if quarantines:
        return damage, *quarantines
    return (
        f"{damage}, but the copy on disk is intact: it was corrupted in the memory of a process. Run the same command "
        f"again: it resumes from the last checkpoint. If this happens again, test the memory of this machine.",
    )


_SHIFT = np.uint64(24)  # checksums of ids have 40 bits, so the sum over 4 million samples fits into 62 bits
_HALF_BITS = 32


def samples_checksum(sample_ids: Sequence[int] | np.ndarray, contents: Sequence[int] | np.ndarray) -> int:
    """Return an order-independent checksum: the sum, modulo 2^64, of a hash of each sample's id and content.

    >>> (samples_checksum([5], [8]) + samples_checksum([3], [7])) % 2**64 == samples_checksum([3, 5], [7, 8])
    True
    """
    both = _mixed(np.asarray(sample_ids, np.uint64)) ^ np.asarray(contents, np.uint64)
    return int(_mixed(both).sum(dtype=np.uint64))


def split_uint64(step_checksum: int) -> tuple[int, int]:
    """Return the checksum as two numbers whose sums over many ranks are exact as int64."""
    return step_checksum & ((1 << _HALF_BITS) - 1), step_checksum >> _HALF_BITS


def join_uint64(low: int, high: int) -> int:
    """Return the checksum from its halves, or from sums of halves.

    >>> join_uint64(*split_uint64(2**64 - 1)) == 2**64 - 1
    True
    """
    return (low + (high << _HALF_BITS)) % (1 << 2 * _HALF_BITS)


def extend_digest(digest: str, step_checksum: int) -> str:
    """Return the digest extended by one step; the initial digest is the empty string."""
    return hashlib.sha256(f"{digest}/{step_checksum}".encode()).hexdigest()


def step_checksum(view: DatasetView, step: int, *, global_batch_size: int) -> int:
    """Return the checksum of the samples of the step."""
    start = step * global_batch_size
    ids = view.order.samples(start, start + global_batch_size)
    return samples_checksum(ids, view.samples.checksums_of(ids))


def digest_of_steps(view: DatasetView, num_steps: int, *, global_batch_size: int) -> str:
    """Return the digest of a run's first `num_steps` steps."""
    digest = ""
    for step in range(num_steps):
        digest = extend_digest(digest, step_checksum(view, step, global_batch_size=global_batch_size))
    return digest


def ids_checksum(sample_ids: Sequence[int] | np.ndarray) -> int:
    """Return an order-independent checksum of sample ids: the sum of a 40-bit hash of each."""
    return int((_mixed(np.asarray(sample_ids, np.uint64)) >> _SHIFT).sum())


def digest_of_step_ids(order: Order, num_steps: int, *, global_batch_size: int) -> str:
    """Return the digest of the first `num_steps` steps in older checkpoints, which only covered sample ids."""
    digest = ""
    for start in range(0, num_steps * global_batch_size, global_batch_size):
        digest = extend_digest(digest, ids_checksum(order.samples(start, start + global_batch_size)))
    return digest


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number: one output of splitmix64 (Steele et al., 2014), seeded with the number."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@dataclass(frozen=True)
class Delivery:
    """The samples in a rank's microbatches of one step."""

    checksum: int  # of their ids and contents
    damaged: tuple[int, ...] = ()  # ids of samples that differ from the prepared ones


@dataclass(frozen=True)
class SampleVerifier:
    """Computes the expected and the received samples of each step."""

    view: DatasetView
    global_batch_size: int

    def expected(self, step: int) -> int:
        """Return the checksum of the step's samples by the order."""
        return step_checksum(self.view, step, global_batch_size=self.global_batch_size)

    def received(self, group: Sequence[Batch]) -> Delivery:
        """Return the samples in the microbatches; if ranks share a row, its samples are counted by the first rank."""
        samples = self.view.samples
        ids = [sample_id for batch in group for sample_id in batch.sample_ids]
        partners = [sample_id for batch in group for sample_id in batch.partner_ids]
        checksums = np.array([value for batch in group for value in batch.checksums], np.uint64)
        partner_checksums = np.array([value for batch in group for value in batch.partner_checksums], np.uint64)
        precomputed = samples.precomputed_checksums_of(np.array(ids, np.int64))
        damaged = (*_differing(samples, ids, checksums), *_differing(samples, partners, partner_checksums))
        is_counted = not any(batch.slice_number or batch.is_copy for batch in group)
        checksum = samples_checksum(ids, checksums - precomputed) if is_counted else 0
        return Delivery(checksum, damaged)

    def explain(self, damaged: Sequence[int]) -> tuple[str, ...]:
        """Return messages about the damage; sets that are damaged on disk are quarantined."""
        return self.view.samples.refuse(np.array(sorted(set(damaged)), np.int64))


Collate = Callable[[Sequence[Features]], Batch]


def collate_with_checksums(collate: Collate, features: Sequence[Features], *, samples: Samples) -> Batch:
    """Return the batch with the checksums of its samples.

    If collation fails because a sample differs from the prepared one, raises a DataError about that instead.
    """
    try:
        return with_checksums(collate(features), features)
    except Exception:
        require_intact(
            samples,
            [sample.sample_id for sample in features],
            [sample_checksum(sample.arrays) for sample in features],
        )
        raise


def with_checksums(batch: Batch, features: Sequence[Features]) -> Batch:
    """Return the batch with the checksums of its samples."""
    partners = [sample.partner for sample in features if sample.partner is not None]
    return replace(
        batch,
        checksums=tuple(sample_checksum(sample.arrays) for sample in features),
        partner_ids=tuple(partner.sample_id for partner in partners),
        partner_checksums=tuple(sample_checksum(partner.arrays) for partner in partners),
    )


def require_intact(samples: Samples, sample_ids: Sequence[int], checksums: Sequence[int]) -> None:
    """Raise DataError if one of these samples differs from the prepared one; a damaged set is quarantined."""
    damaged = _differing(samples, sample_ids, np.array(checksums, np.uint64))
    if damaged:
        raise DataError("\n".join(samples.refuse(np.array(damaged, np.int64))))


def _differing(samples: Samples, sample_ids: Sequence[int], checksums: np.ndarray) -> tuple[int, ...]:
    """Return the ids of samples whose checksums differ from the prepared samples'."""
    if len(sample_ids) != len(checksums):
        raise ValueError(f"{len(sample_ids)} samples with {len(checksums)} checksums")
    ids = np.array(sample_ids, np.int64)
    if not len(ids):
        return ()
    prepared = samples.checksums_of(ids) + samples.precomputed_checksums_of(ids)
    return tuple(ids[checksums != prepared].tolist())
