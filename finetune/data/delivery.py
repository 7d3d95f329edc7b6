"""What a loader has delivered, compared with what was prepared: by the marks of the arrays that were collated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.consumed import mark, step_mark
from finetune.data.order.pool import Pool, Samples
from finetune.data.verified.marks import mark_of
from finetune.errors import DataError


@dataclass(frozen=True)
class Delivery:
    """What a rank's microbatches of one step hold."""

    mark: int  # of its samples, by id and content (`data/order/consumed.py`)
    damaged: tuple[int, ...] = ()  # ids of samples that are not what was prepared
    problem: str | None = None  # what else is known to be damaged


@dataclass(frozen=True)
class Deliveries:
    """What a run is to be handed, and what it is."""

    pool: Pool
    global_batch_size: int

    def expected(self, step: int) -> int:
        """Return the mark of the samples of which the step must consist."""
        return step_mark(self.pool, step, global_batch_size=self.global_batch_size)

    def received(self, group: Sequence[Batch]) -> Delivery:
        """Return what the microbatches hold."""
        samples = self.pool.samples
        ids = [sample_id for batch in group for sample_id in batch.sample_ids]
        partners = [sample_id for batch in group for sample_id in batch.partner_ids]
        marks = np.array([each for batch in group for each in batch.marks], np.uint64)
        partner_marks = np.array([each for batch in group for each in batch.partner_marks], np.uint64)
        beside = samples.known_marks_of(np.array(ids, np.int64))
        damaged = (*_differing(samples, ids, marks), *_differing(samples, partners, partner_marks))
        return Delivery(mark(ids, marks - beside), damaged, samples.problem())

    def explain(self, damaged: Sequence[int]) -> tuple[str, ...]:
        """Return what is to be said of damage; what is damaged on disk, too, is set aside by then."""
        return self.pool.samples.refuse(np.array(sorted(set(damaged)), np.int64))


Collate = Callable[[Sequence[Features]], Batch]


def collated(collate: Collate, features: Sequence[Features], *, samples: Samples) -> Batch:
    """Return the batch with the marks of what it was collated from.

    Where that fails because a sample is not what was prepared, raises DataError that says so.
    """
    try:
        return marked(collate(features), features)
    except Exception:
        _require_intact(samples, marked(_NOTHING, features), [each.sample_id for each in features])
        raise


def marked(batch: Batch, features: Sequence[Features]) -> Batch:
    """Return the batch with the marks of what it was collated from."""
    partners = [each.partner for each in features if each.partner is not None]
    return replace(
        batch,
        marks=tuple(mark_of(each.arrays) for each in features),
        partner_ids=tuple(each.sample_id for each in partners),
        partner_marks=tuple(mark_of(each.arrays) for each in partners),
    )


def require_intact(samples: Samples, batch: Batch) -> None:
    """Raise DataError where a sample in the batch is not what was prepared; it is set aside by then."""
    _require_intact(samples, batch, batch.sample_ids)


def _require_intact(samples: Samples, batch: Batch, sample_ids: Sequence[int]) -> None:
    damaged = _differing(samples, sample_ids, np.array(batch.marks, np.uint64))
    if damaged:
        raise DataError("\n".join(samples.refuse(np.array(damaged, np.int64))))


_NOTHING = Batch({}, torch.zeros(0), num_targets=0, num_tokens=0, sample_ids=())


def _differing(samples: Samples, sample_ids: Sequence[int], marks: np.ndarray) -> tuple[int, ...]:
    if len(sample_ids) != len(marks):
        raise ValueError(f"{len(sample_ids)} samples with {len(marks)} marks")
    ids = np.array(sample_ids, np.int64)
    if not len(ids):
        return ()
    prepared = samples.marks_of(ids) + samples.known_marks_of(ids)
    return tuple(ids[marks != prepared].tolist())
