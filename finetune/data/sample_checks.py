"""What the loader delivered, checked against what was prepared, and the digest of all that the run consumed."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.dataset_view import DatasetView, Samples
from finetune.data.order.order import Order
from finetune.data.token_cache.integrity import sample_checksum
from finetune.errors import DataError

_SHIFT = np.uint64(24)  # marks of ids have 40 bits: the sum over 4 million samples fits into 62
_HALF_BITS = 32


def samples_checksum(sample_ids: Sequence[int] | np.ndarray, contents: Sequence[int] | np.ndarray) -> int:
    """Return the sum, modulo 2^64, of one number per sample that depends on its id and its content and on no order.

    >>> (samples_checksum([5], [8]) + samples_checksum([3], [7])) % 2**64 == samples_checksum([3, 5], [7, 8])
    True
    """
    both = _mixed(np.asarray(sample_ids, np.uint64)) ^ np.asarray(contents, np.uint64)
    return int(_mixed(both).sum(dtype=np.uint64))


def split_uint64(step_checksum: int) -> tuple[int, int]:
    """Return the mark as two numbers that stay exact when those of many ranks are added up as int64."""
    return step_checksum & ((1 << _HALF_BITS) - 1), step_checksum >> _HALF_BITS


def join_uint64(low: int, high: int) -> int:
    """Return the mark of which these are the halves, or sums of them.

    >>> join_uint64(*split_uint64(2**64 - 1)) == 2**64 - 1
    True
    """
    return (low + (high << _HALF_BITS)) % (1 << 2 * _HALF_BITS)


def extend_digest(digest: str, step_checksum: int) -> str:
    """Return the digest with one more step in it; the first step is rolled onto the empty text."""
    return hashlib.sha256(f"{digest}/{step_checksum}".encode()).hexdigest()


def step_checksum(view: DatasetView, step: int, *, global_batch_size: int) -> int:
    """Return the mark of the samples that the order gives to the step."""
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
    """Return the sum of one 40-bit number per sample id, an exact integer that depends on no order."""
    return int((_mixed(np.asarray(sample_ids, np.uint64)) >> _SHIFT).sum())


def digest_of_step_ids(order: Order, num_steps: int, *, global_batch_size: int) -> str:
    """Return what stood for the first `num_steps` steps in checkpoints that knew no contents."""
    digest = ""
    for start in range(0, num_steps * global_batch_size, global_batch_size):
        digest = extend_digest(digest, ids_checksum(order.samples(start, start + global_batch_size)))
    return digest


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers' bits mixed: one output each of splitmix64 (Steele et al., 2014), seeded with the number."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@dataclass(frozen=True)
class Delivery:
    """What a rank's microbatches of one step hold."""

    mark: int  # of its samples, by id and content (`data/sample_checks.py`)
    damaged: tuple[int, ...] = ()  # ids of samples that are not what was prepared
    problem: str | None = None  # what else is known to be damaged


@dataclass(frozen=True)
class SampleVerifier:
    """What a run is to be handed, and what it is."""

    view: DatasetView
    global_batch_size: int

    def expected(self, step: int) -> int:
        """Return the mark of the samples of which the step must consist."""
        return step_checksum(self.view, step, global_batch_size=self.global_batch_size)

    def received(self, group: Sequence[Batch]) -> Delivery:
        """Return what the microbatches hold; of a row that ranks share, the first rank has the mark."""
        samples = self.view.samples
        ids = [sample_id for batch in group for sample_id in batch.sample_ids]
        partners = [sample_id for batch in group for sample_id in batch.partner_ids]
        marks = np.array([each for batch in group for each in batch.checksums], np.uint64)
        partner_marks = np.array([each for batch in group for each in batch.partner_checksums], np.uint64)
        precomputed = samples.precomputed_checksums_of(np.array(ids, np.int64))
        damaged = (*_differing(samples, ids, marks), *_differing(samples, partners, partner_marks))
        is_counted = not any(batch.slice_number for batch in group)
        mark = samples_checksum(ids, marks - precomputed) if is_counted else 0
        return Delivery(mark, damaged, samples.problem())

    def explain(self, damaged: Sequence[int]) -> tuple[str, ...]:
        """Return messages on damage; what is damaged on disk, too, is set aside."""
        return self.view.samples.refuse(np.array(sorted(set(damaged)), np.int64))


Collate = Callable[[Sequence[Features]], Batch]


def collate_with_checksums(collate: Collate, features: Sequence[Features], *, samples: Samples) -> Batch:
    """Return the batch with the marks of what it was collated from.

    Where that fails because a sample is not what was prepared, raises DataError that says so.
    """
    try:
        return with_checksums(collate(features), features)
    except Exception:
        _require_intact(samples, with_checksums(_NOTHING, features), [each.sample_id for each in features])
        raise


def with_checksums(batch: Batch, features: Sequence[Features]) -> Batch:
    """Return the batch with the marks of what it was collated from."""
    partners = [each.partner for each in features if each.partner is not None]
    return replace(
        batch,
        checksums=tuple(sample_checksum(each.arrays) for each in features),
        partner_ids=tuple(each.sample_id for each in partners),
        partner_checksums=tuple(sample_checksum(each.arrays) for each in partners),
    )


def require_intact(samples: Samples, batch: Batch) -> None:
    """Raise DataError where a sample in the batch is not what was prepared; it is set aside by then."""
    _require_intact(samples, batch, batch.sample_ids)


def _require_intact(samples: Samples, batch: Batch, sample_ids: Sequence[int]) -> None:
    damaged = _differing(samples, sample_ids, np.array(batch.checksums, np.uint64))
    if damaged:
        raise DataError("\n".join(samples.refuse(np.array(damaged, np.int64))))


_NOTHING = Batch({}, torch.zeros(0), num_targets=0, num_tokens=0, sample_ids=())


def _differing(samples: Samples, sample_ids: Sequence[int], marks: np.ndarray) -> tuple[int, ...]:
    if len(sample_ids) != len(marks):
        raise ValueError(f"{len(sample_ids)} samples with {len(marks)} marks")
    ids = np.array(sample_ids, np.int64)
    if not len(ids):
        return ()
    prepared = samples.checksums_of(ids) + samples.precomputed_checksums_of(ids)
    return tuple(ids[marks != prepared].tolist())
