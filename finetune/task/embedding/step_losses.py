"""The loss of a whole step and its gradient with respect to this rank's vectors.

GradCache (Gao et al., 2021, arXiv:2101.06983): the loss is computed once from the vectors of all microbatches and
ranks. Each microbatch is then computed again, and the product of its vectors and their gradient has the loss's own
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from finetune.config.sections.task import EmbeddingSection
from finetune.data.batch import Batch
from finetune.runtime import distributed
from finetune.task.embedding.duplicates import MaskedPairs, masked_anchors, masked_passages
from finetune.task.embedding.similarity_losses import InfoNce, Similarity, cosent


@dataclass(frozen=True)
class OwnVectors:
    """The vectors of this rank's microbatches; each has its anchors, below them its positives, then its negatives."""

    vectors: Tensor  # [texts, dimensions]
    batches: Sequence[Batch]

    @property
    def num_rows(self) -> int:
        """Return the number of anchors."""
        return sum(len(batch.group_sizes) for batch in self.batches)

    def by_role(self, vectors: Tensor) -> Tensor:
        """Return the vectors with the anchors of all microbatches first, then all positives, then all negatives."""
        each = torch.split(vectors, [len(batch.text_ids) for batch in self.batches])
        parts = [_bounds(batch) for batch in self.batches]
        return torch.cat([each[n][slice(*parts[n][role])] for role in range(3) for n in range(len(parts))])

    def ids_by_role(self) -> np.ndarray:
        """Return the digests of the texts in the same order."""
        bounds = [_bounds(batch) for batch in self.batches]
        ids = [
            batch.text_ids[slice(*each[role])]
            for role in range(3)
            for batch, each in zip(self.batches, bounds, strict=True)
        ]
        return np.array([one for each in ids for one in each], np.int64)

    def by_batch(self, row_losses: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return of each microbatch its loss, summed over its rows, and the gradient of its vectors."""
        losses = torch.split(row_losses, [len(batch.group_sizes) for batch in self.batches])
        gradients = torch.split(gradient, [len(batch.text_ids) for batch in self.batches])
        return [(loss.sum(), each) for loss, each in zip(losses, gradients, strict=True)]


def _bounds(batch: Batch) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    rows, texts = len(batch.group_sizes), len(batch.text_ids)
    return (0, rows), (rows, 2 * rows), (2 * rows, texts)


@dataclass(frozen=True)
class StepLoss:
    """What a step has come to on this rank."""

    row_losses: Tensor  # float32 [rows]; the sum over all ranks is what is minimized
    gradient: Tensor  # of that sum, [texts, dimensions]
    num_masked: int = 0  # passages that are left out because they are right for an anchor of this rank


class LossOfStep(Protocol):
    """A loss in which all rows of a step meet."""

    def __call__(self, own: OwnVectors) -> StepLoss:
        """Return the loss of the step and the gradient of this rank's vectors. Collective."""


@dataclass(frozen=True)
class InfoNceOfStep:
    """InfoNCE whose candidates are the passages of the whole step."""

    loss: InfoNce

    def __call__(self, own: OwnVectors) -> StepLoss:
        """Return the losses of this rank's anchors, and the gradient that the anchors of all ranks give. Collective."""
        leaf = own.vectors.detach().requires_grad_()
        with torch.enable_grad():
            sorted_vectors = own.by_role(leaf)
        everyone = _Everyone.gather(sorted_vectors, own.ids_by_role(), num_rows=own.num_rows)
        anchors, passages = (each.requires_grad_() for each in (everyone.anchors, everyone.passages))
        masked = everyone.masked(symmetric=self.loss.symmetric)
        losses = self.loss(anchors, passages, rows=everyone.own_rows, masked=masked)
        assert anchors.grad is not None and passages.grad is not None
        both = distributed.sum_tensor(torch.cat([anchors.grad, passages.grad]))
        (gradient,) = torch.autograd.grad(sorted_vectors, leaf, everyone.own_part(both))
        return StepLoss(losses, gradient, num_masked=len(masked[0]))

    def of_all(self, vectors: Tensor, ids: np.ndarray, *, num_rows: int) -> Tensor:
        """Return the loss of each row where the texts, by role, are those of all ranks."""
        everyone = _Everyone.alone(vectors, ids, num_rows=num_rows)
        masked = everyone.masked(symmetric=self.loss.symmetric)
        return self.loss(everyone.anchors, everyone.passages, rows=everyone.own_rows, masked=masked)


@dataclass(frozen=True)
class _Everyone:
    """The vectors and digests of all ranks, and which of them are this rank's."""

    anchors: Tensor  # [rows, dimensions]
    passages: Tensor  # the positives in the order of their rows, then the negatives
    anchor_ids: np.ndarray
    passage_ids: np.ndarray
    num_rows: tuple[int, ...]  # of each rank
    num_texts: tuple[int, ...]
    rank: int

    @classmethod
    def gather(cls, vectors: Tensor, ids: np.ndarray, *, num_rows: int) -> "_Everyone":
        """Return those of all ranks from this rank's, by role. Collective."""
        gathered = distributed.gather_objects((ids, num_rows))
        found = distributed.gather_rows(vectors, [len(each) for each, _ in gathered])
        return cls.of(found, [each for each, _ in gathered], [rows for _, rows in gathered], distributed.rank())

    @classmethod
    def alone(cls, vectors: Tensor, ids: np.ndarray, *, num_rows: int) -> "_Everyone":
        """Return these alone."""
        return cls.of([vectors], [ids], [num_rows], 0)

    @classmethod
    def of(cls, vectors: Sequence[Tensor], ids: Sequence[np.ndarray], rows: Sequence[int], rank: int) -> "_Everyone":
        """Return them from those of each rank."""
        positives = [each[num : 2 * num] for each, num in zip(vectors, rows, strict=True)]
        negatives = [each[2 * num :] for each, num in zip(vectors, rows, strict=True)]
        positive_ids = [each[num : 2 * num] for each, num in zip(ids, rows, strict=True)]
        negative_ids = [each[2 * num :] for each, num in zip(ids, rows, strict=True)]
        return cls(
            anchors=torch.cat([each[:num] for each, num in zip(vectors, rows, strict=True)]),
            passages=torch.cat([*positives, *negatives]),
            anchor_ids=np.concatenate([each[:num] for each, num in zip(ids, rows, strict=True)]),
            passage_ids=np.concatenate([*positive_ids, *negative_ids]),
            num_rows=tuple(rows),
            num_texts=tuple(map(len, ids)),
            rank=rank,
        )

    @property
    def own_rows(self) -> range:
        """Return this rank's rows."""
        start = sum(self.num_rows[: self.rank])
        return range(start, start + self.num_rows[self.rank])

    def masked(self, *, symmetric: bool) -> tuple[MaskedPairs, ...]:
        """Return the pairs that are left out of this rank's rows, and with `symmetric` those of its positives."""
        passages = masked_passages(self.anchor_ids, self.passage_ids, self.own_rows)
        if not symmetric:
            return (passages,)
        return passages, masked_anchors(self.anchor_ids, self.passage_ids, self.own_rows)

    def own_part(self, both: Tensor) -> Tensor:
        """Return what belongs to this rank's texts, by role, of values of all anchors and below them all passages."""
        total, own = sum(self.num_rows), self.own_rows
        num_negatives = [texts - 2 * rows for texts, rows in zip(self.num_texts, self.num_rows, strict=True)]
        first = 2 * total + sum(num_negatives[: self.rank])
        parts = (
            both[own.start : own.stop],
            both[total + own.start : total + own.stop],
            both[first : first + num_negatives[self.rank]],
        )
        return torch.cat(parts)


@dataclass(frozen=True)
class CosentOfStep:
    """CoSENT over all pairs of the step. Each row has the same loss, so that this is their mean."""

    similarity: Similarity
    temperature: float

    def __call__(self, own: OwnVectors) -> StepLoss:
        """Return the loss of the step, and the gradient of this rank's vectors. Collective."""
        leaf = own.vectors.detach().requires_grad_()
        with torch.enable_grad():
            sorted_vectors = own.by_role(leaf)
            first, second = sorted_vectors.chunk(2)
            similarities = self.similarity.of_pairs(first, second)  # [rows, sizes]
        sizes = distributed.gather_objects(own.num_rows)
        labels = torch.cat([batch.labels for batch in own.batches])
        scores = torch.cat(distributed.gather_rows(labels, sizes))
        everyone = torch.cat(distributed.gather_rows(similarities, sizes)).requires_grad_()
        with torch.enable_grad():
            loss = self.of_similarities(everyone, scores)
        (of_everyone,) = torch.autograd.grad(loss * len(scores), everyone)
        start = sum(sizes[: distributed.rank()])
        (gradient,) = torch.autograd.grad(similarities, leaf, of_everyone[start : start + own.num_rows])
        return StepLoss(loss.detach().expand(own.num_rows), gradient)

    def of_similarities(self, similarities: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of all pairs, a scalar, from their similarities at each size, [pairs, sizes]."""
        each = [cosent(column, scores, temperature=self.temperature) for column in similarities.unbind(dim=1)]
        return torch.stack(each).mean()


def infonce_of_step(similarity: Similarity, section: EmbeddingSection) -> LossOfStep:
    """Return InfoNCE over the global batch."""
    return InfoNceOfStep(InfoNce(similarity, section.temperature, section.symmetric))


def cosent_of_step(similarity: Similarity, section: EmbeddingSection) -> LossOfStep:
    """Return CoSENT over the global batch."""
    return CosentOfStep(similarity, section.temperature)
