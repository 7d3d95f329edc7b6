"""Checks of the loader's samples against the prepared set, and the digest of all samples that a run consumed."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.order import DatasetView, Order, Samples
from finetune.data.token_cache.integrity import sample_checksum
from finetune.errors import DataError

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
    problem: str | None = None  # other known damage


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
        return Delivery(checksum, damaged, samples.problem())

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
        checksums = [sample_checksum(sample.arrays) for sample in features]
        _require_intact(samples, [sample.sample_id for sample in features], checksums)
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


def require_intact(samples: Samples, batch: Batch) -> None:
    """Raise DataError if a sample in the batch differs from the prepared one; a damaged set is quarantined."""
    _require_intact(samples, batch.sample_ids, batch.checksums)


def _require_intact(samples: Samples, sample_ids: Sequence[int], checksums: Sequence[int]) -> None:
    damaged = _differing(samples, sample_ids, np.array(checksums, np.uint64))
    if damaged:
        raise DataError("\n".join(samples.refuse(np.array(damaged, np.int64))))


def _differing(samples: Samples, sample_ids: Sequence[int], checksums: np.ndarray) -> tuple[int, ...]:
    """Return the ids of samples whose checksums differ from those of the prepared samples."""
    if len(sample_ids) != len(checksums):
        raise ValueError(f"{len(sample_ids)} samples with {len(checksums)} checksums")
    ids = np.array(sample_ids, np.int64)
    if not len(ids):
        return ()
    prepared = samples.checksums_of(ids) + samples.precomputed_checksums_of(ids)
    return tuple(ids[checksums != prepared].tolist())
