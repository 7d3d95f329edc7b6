"""Losses on vector similarities: InfoNCE and CoSENT over all rows of a step, and the squared error of the cosine.

Every loss is averaged over the trained dimensions (Matryoshka: Kusupati et al., 2022, arXiv:2205.13147): the full
vectors and their leading components.

The loss of a step needs the vectors of all its microbatches and ranks. It is computed once from these, and every
microbatch receives the gradient of its own vectors (GradCache: Gao et al., 2021, arXiv:2101.06983).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from finetune.config.sections.task import EmbeddingSection
from finetune.data.batch import Batch
from finetune.runtime import distributed

_MAX_LOGITS = 1 << 26
"""Maximum number of similarities to compute at once."""


@dataclass(frozen=True)
class Similarity:
    """The similarity of vectors, at one or several dimensions."""

    normalize: bool = True
    sizes: tuple[int, ...] = ()  # dimensions below the full one

    def views(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the vectors to compare, in full and then truncated to every size."""
        full = vectors[0].shape[-1]
        for size in dict.fromkeys((full, *self.sizes)):
            truncated = (tensor[..., :size] for tensor in vectors)
            yield tuple(functional.normalize(view, dim=-1) if self.normalize else view for view in truncated)

    def of_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the row-wise similarity of both tensors at every size, [rows, sizes]."""
        return torch.stack([(one * other).sum(dim=-1) for one, other in self.views(first, second)], dim=1)


@dataclass(frozen=True)
class MaskedPairs:
    """Pairs of a row and a candidate that are excluded from the loss."""

    rows: np.ndarray  # int64 [pairs], ascending
    candidates: np.ndarray  # int64 [pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def indices(self, rows: range, *, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the pairs of these rows as indices into their logits; None if there are none."""
        first, last = np.searchsorted(self.rows, [rows.start, rows.stop])
        if first == last:
            return None
        both = torch.from_numpy(np.stack([self.rows[first:last] - rows.start, self.candidates[first:last]]))
        if device.type == "cuda":
            both = both.pin_memory()
        row, candidate = both.to(device, non_blocking=True)
        return row, candidate


@dataclass(frozen=True)
class InfoNce:
    """Cross-entropy of identifying an anchor's passage among all (van den Oord et al., 2018, arXiv:1807.03748).

    With `symmetric`, the mean of this and the cross-entropy of identifying a passage's anchor among all.
    """

    similarity: Similarity
    temperature: float
    symmetric: bool = False

    def __call__(self, anchors: Tensor, passages: Tensor, *, rows: range, masked: Sequence[MaskedPairs]) -> Tensor:
        """Return the loss of these rows, float32 [rows], and add gradients to both tensors if they require them.

        Row i has anchor i and passage i; further passages are negatives of all rows. `masked` are the excluded pairs of
        rows and passages and, if symmetric, of rows and anchors. Computes chunks of rows.
        """
        losses = anchors.new_zeros(len(rows))
        needs_gradient = anchors.requires_grad
        chunk_size = max(1, _MAX_LOGITS // max(1, len(passages)))
        with torch.set_grad_enabled(needs_gradient):
            views = list(self.similarity.views(anchors, passages))
            for view in views:
                leaves = [tensor.detach().requires_grad_(needs_gradient) for tensor in view]
                for start in range(rows.start, rows.stop, chunk_size):
                    chunk = range(start, min(start + chunk_size, rows.stop))
                    chunk_losses = self._losses(*leaves, rows=chunk, masked=masked) / len(views)
                    losses[chunk.start - rows.start : chunk.stop - rows.start] += chunk_losses.detach()
                    if needs_gradient:
                        chunk_losses.sum().backward()  # type: ignore[no-untyped-call]
                if needs_gradient:
                    torch.autograd.backward(view, [leaf.grad for leaf in leaves])
        return losses.detach()

    def _losses(self, anchors: Tensor, passages: Tensor, *, rows: range, masked: Sequence[MaskedPairs]) -> Tensor:
        own = slice(rows.start, rows.stop)
        forward = self._cross_entropy(anchors[own], passages, rows=rows, masked=masked[0])
        if not self.symmetric:
            return forward
        backward = self._cross_entropy(passages[own], anchors, rows=rows, masked=masked[1])
        return (forward + backward) / 2

    def _cross_entropy(self, queries: Tensor, candidates: Tensor, *, rows: range, masked: MaskedPairs) -> Tensor:
        logits = queries @ candidates.T / self.temperature  # [rows, candidates]
        indices = masked.indices(rows, device=logits.device)
        if indices is not None:
            logits = logits.index_put(indices, logits.new_full((), -torch.inf))
        own = torch.arange(rows.start, rows.stop, device=logits.device)
        return functional.cross_entropy(logits, own, reduction="none")


def cosent(similarities: Tensor, scores: Tensor, *, temperature: float) -> Tensor:
    """Return the CoSENT loss, a scalar: log(1 + sum of exp((s_j - s_i) / T) over i, j where i has the higher score).

    Both inputs are [pairs] (Su, 2022, https://kexue.fm/archives/8847). Uses prefix sums in score order: O(n log n)
    for a sum of O(n^2) terms.
    """
    ordered, order = scores.sort()
    scaled = similarities[order] / temperature
    below = torch.searchsorted(ordered, ordered)  # per pair, the number of pairs with a lower score
    prefix = scaled.logcumsumexp(dim=0)
    terms = prefix[(below - 1).clamp(min=0)] - scaled
    terms = terms.masked_fill(below == 0, -torch.inf)
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)


@dataclass(frozen=True)
class OwnVectors:
    """The vectors of this rank's microbatches; each has its anchors, then its positives, then its negatives."""

    vectors: Tensor  # [texts, dimensions]
    batches: Sequence[Batch]

    @property
    def num_rows(self) -> int:
        """Return the number of anchors."""
        return sum(len(batch.group_sizes) for batch in self.batches)

    def by_role(self, vectors: Tensor) -> Tensor:
        """Return the vectors with the anchors of all microbatches first, then all positives, then all negatives."""
        by_batch = torch.split(vectors, [len(batch.text_ids) for batch in self.batches])
        roles = [_roles(batch) for batch in self.batches]
        return torch.cat([by_batch[n][roles[n][role]] for role in range(3) for n in range(len(roles))])

    def ids_by_role(self) -> np.ndarray:
        """Return the digests of the texts in the same order."""
        ids = [
            text_id for role in range(3) for batch in self.batches for text_id in batch.text_ids[_roles(batch)[role]]
        ]
        return np.array(ids, np.int64)

    def by_batch(self, row_losses: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the loss summed over rows and the gradient of the vectors, by microbatch."""
        losses = torch.split(row_losses, [len(batch.group_sizes) for batch in self.batches])
        gradients = torch.split(gradient, [len(batch.text_ids) for batch in self.batches])
        return [(loss.sum(), batch_gradient) for loss, batch_gradient in zip(losses, gradients, strict=True)]


def _roles(batch: Batch) -> tuple[slice, slice, slice]:
    """Return the slices of a batch's anchors, positives and negatives."""
    num_rows = len(batch.group_sizes)
    return slice(0, num_rows), slice(num_rows, 2 * num_rows), slice(2 * num_rows, len(batch.text_ids))


@dataclass(frozen=True)
class StepLoss:
    """The result of a step on this rank."""

    row_losses: Tensor  # float32 [rows]; the sum over all ranks is minimized
    gradient: Tensor  # of that sum, [texts, dimensions]
    num_masked: int = 0  # passages excluded because they are relevant to an anchor of this rank


class LossOfStep(Protocol):
    """A loss over all rows of a step."""

    def __call__(self, own: OwnVectors) -> StepLoss:
        """Return the loss of the step and the gradient of this rank's vectors. Collective."""


@dataclass(frozen=True)
class InfoNceOfStep:
    """InfoNCE whose candidates are the passages of the whole step."""

    loss: InfoNce

    def __call__(self, own: OwnVectors) -> StepLoss:
        """Return this rank's losses, and its vectors' gradient from the anchors of all ranks. Collective."""
        leaf = own.vectors.detach().requires_grad_()
        with torch.enable_grad():
            sorted_vectors = own.by_role(leaf)
        everyone = _Everyone.gather(sorted_vectors, own.ids_by_role(), num_rows=own.num_rows)
        anchors = everyone.anchors.requires_grad_()
        passages = everyone.passages.requires_grad_()
        masked = everyone.masked(symmetric=self.loss.symmetric)
        losses = self.loss(anchors, passages, rows=everyone.own_rows, masked=masked)
        assert anchors.grad is not None and passages.grad is not None
        both = distributed.sum_tensor(torch.cat([anchors.grad, passages.grad]))
        (gradient,) = torch.autograd.grad(sorted_vectors, leaf, everyone.own_part(both))
        return StepLoss(losses, gradient, num_masked=len(masked[0]))

    def of_all(self, vectors: Tensor, ids: np.ndarray, *, num_rows: int) -> Tensor:
        """Return the loss of every row for the texts of all ranks, ordered by role."""
        everyone = _Everyone.of([vectors], [ids], [num_rows], 0)
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
        """Gather the vectors and digests of all ranks; `vectors` and `ids` are ordered by role. Collective."""
        gathered = distributed.gather_objects((ids, num_rows))
        all_ids = [rank_ids for rank_ids, _ in gathered]
        all_vectors = distributed.gather_rows(vectors, [len(rank_ids) for rank_ids in all_ids])
        return cls.of(all_vectors, all_ids, [rows for _, rows in gathered], distributed.rank())

    @classmethod
    def of(cls, vectors: Sequence[Tensor], ids: Sequence[np.ndarray], rows: Sequence[int], rank: int) -> "_Everyone":
        """Combine the texts of all ranks."""
        vectors_by_rank = list(zip(vectors, rows, strict=True))
        positives = [tensor[num : 2 * num] for tensor, num in vectors_by_rank]
        negatives = [tensor[2 * num :] for tensor, num in vectors_by_rank]
        ids_by_rank = list(zip(ids, rows, strict=True))
        positive_ids = [array[num : 2 * num] for array, num in ids_by_rank]
        negative_ids = [array[2 * num :] for array, num in ids_by_rank]
        return cls(
            anchors=torch.cat([tensor[:num] for tensor, num in vectors_by_rank]),
            passages=torch.cat([*positives, *negatives]),
            anchor_ids=np.concatenate([array[:num] for array, num in ids_by_rank]),
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
        """Return the excluded pairs of this rank's anchors and, with `symmetric`, those of its positives."""
        passages = masked_passages(self.anchor_ids, self.passage_ids, self.own_rows)
        if not symmetric:
            return (passages,)
        return passages, masked_anchors(self.anchor_ids, self.passage_ids, self.own_rows)

    def own_part(self, both: Tensor) -> Tensor:
        """Return this rank's part, ordered by role, of values of all anchors followed by all passages."""
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
    """CoSENT over all pairs of the step. Every row gets the same loss, so that the step's loss is their mean."""

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
        (similarity_gradient,) = torch.autograd.grad(loss * len(scores), everyone)
        start = sum(sizes[: distributed.rank()])
        (gradient,) = torch.autograd.grad(similarities, leaf, similarity_gradient[start : start + own.num_rows])
        return StepLoss(loss.detach().expand(own.num_rows), gradient)

    def of_similarities(self, similarities: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of all pairs, a scalar, from their similarities at every size, [pairs, sizes]."""
        losses = [cosent(column, scores, temperature=self.temperature) for column in similarities.unbind(dim=1)]
        return torch.stack(losses).mean()


def infonce_of_step(similarity: Similarity, section: EmbeddingSection) -> LossOfStep:
    """Return InfoNCE over the global batch."""
    return InfoNceOfStep(InfoNce(similarity, section.temperature, section.symmetric))


def cosent_of_step(similarity: Similarity, section: EmbeddingSection) -> LossOfStep:
    """Return CoSENT over the global batch."""
    return CosentOfStep(similarity, section.temperature)


def masked_passages(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return the passages relevant to the anchor of each of these rows, except the row's own: not to be negatives.

    Row i has anchor i and passage i; both arrays hold digests of texts. With negatives there are more passages than
    anchors. A text is relevant to an anchor if it is the positive of an equal anchor.
    """
    positives = passage_ids[: len(anchor_ids)]
    relevant = _partners(anchor_ids, positives)
    return _pairs(
        anchor_ids, passage_ids, rows, relevant=relevant, may_have=_occurs_twice(anchor_ids, positives, passage_ids)
    )


def masked_anchors(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return the anchors to which the positive of each of these rows is relevant, except the row's own."""
    positives = passage_ids[: len(anchor_ids)]
    relevant = _partners(positives, anchor_ids)
    may_have = _occurs_twice(anchor_ids, positives, positives)
    return _pairs(positives, anchor_ids, rows, relevant=relevant, may_have=may_have)


def _partners(ids: np.ndarray, others: np.ndarray) -> Mapping[int, set[int]]:
    partners: dict[int, set[int]] = defaultdict(set)
    for text, partner in zip(ids.tolist(), others.tolist(), strict=True):
        partners[text].add(partner)
    return partners


def _occurs_twice(anchor_ids: np.ndarray, positives: np.ndarray, passage_ids: np.ndarray) -> np.ndarray:
    """Return whether the anchor or the positive of each row occurs again; only these rows can have pairs."""
    occurs: np.ndarray = _counts(anchor_ids, anchor_ids) + _counts(positives, passage_ids) > 2
    return occurs


def _counts(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    distinct, numbers = np.unique(among, return_counts=True)
    counts: np.ndarray = numbers[np.searchsorted(distinct, ids)]
    return counts


def _pairs(
    ids: np.ndarray, candidates: np.ndarray, rows: range, *, relevant: Mapping[int, set[int]], may_have: np.ndarray
) -> MaskedPairs:
    chosen = [row for row in rows if may_have[row]]
    row_candidates: list[tuple[int, int]] = []
    if chosen:
        indices: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(candidates.tolist()):
            indices[text].append(index)
        for row in chosen:
            same = (index for text in relevant[int(ids[row])] for index in indices[text] if index != row)
            row_candidates.extend((row, index) for index in sorted(same))
    pairs = np.array(row_candidates, np.int64).reshape(-1, 2)
    return MaskedPairs(pairs[:, 0], pairs[:, 1])
