"""Losses on vector similarities: InfoNCE and CoSENT over all rows of a step, and the squared error of the cosine.

Every loss is averaged over the trained dimensions (Matryoshka: Kusupati et al., 2022, arXiv:2205.13147): the full
vectors and their leading components.

The loss of a step needs the vectors of all its microbatches and ranks. It is computed once from these, and every
microbatch receives the gradient of its own vectors (GradCache: Gao et al., 2021, arXiv:2101.06983).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

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
class StepLoss:
    """The result of a step on this rank."""

    row_losses: Tensor  # float32 [rows]; the sum over all ranks is minimized
    gradient: Tensor  # of that sum, [texts, dimensions]
    num_masked: int = 0  # passages excluded because they are relevant to an anchor of this rank


LossOfStep = Callable[[Tensor, Sequence[Batch]], StepLoss]
"""From the vectors of this rank's microbatches, [texts, dimensions], to that over all rows of the step. Collective."""


MaskedPairs = np.ndarray
"""Pairs of a row and a candidate that are excluded from the loss, int64 [2, pairs], ascending by row."""


@dataclass(frozen=True)
class InfoNce:
    """Cross-entropy of identifying an anchor's passage among all (van den Oord et al., 2018, arXiv:1807.03748).

    The candidates are the passages of the whole step. With `symmetric`, it is the mean of this and the cross-entropy of
    identifying a passage's anchor among all.
    """

    similarity: Similarity
    section: EmbeddingSection

    def __call__(self, vectors: Tensor, batches: Sequence[Batch]) -> StepLoss:
        """Return this rank's losses, and its vectors' gradient from the anchors of all ranks. Collective."""
        leaf = vectors.detach().requires_grad_()
        sizes = [len(batch.group_sizes) for batch in batches]
        with torch.enable_grad():
            parts = by_role(torch.split(leaf, [len(batch.text_ids) for batch in batches]), sizes)
            sorted_vectors = torch.cat([*chain(*parts)])
        own_ids = [*chain(*chain(*by_role([batch.text_ids for batch in batches], sizes)))]
        # the vectors and digests of all ranks
        gathered = distributed.gather_objects((np.array(own_ids, np.int64), sum(sizes)))
        ids, num_rows = [rank_ids for rank_ids, _ in gathered], [rows for _, rows in gathered]
        all_vectors = distributed.gather_rows(sorted_vectors, [len(rank_ids) for rank_ids in ids])
        anchors, passages = (torch.cat(parts).requires_grad_() for parts in by_role(all_vectors, num_rows))
        rank = distributed.rank()
        start, total = sum(num_rows[:rank]), sum(num_rows)
        rows = range(start, start + num_rows[rank])
        masked = self._masked(*(np.concatenate(parts) for parts in by_role(ids, num_rows)), rows=rows)
        losses = self.row_losses(anchors, passages, rows=rows, masked=masked)
        assert anchors.grad is not None and passages.grad is not None
        both = distributed.sum_tensor(torch.cat([anchors.grad, passages.grad]))
        num_negatives = [len(rank_ids) - 2 * num for rank_ids, num in zip(ids, num_rows, strict=True)]
        first = 2 * total + sum(num_negatives[:rank])
        own_anchors, own_positives = both[start : rows.stop], both[total + start : total + rows.stop]
        own_negatives = both[first : first + num_negatives[rank]]
        own_gradient = torch.cat([own_anchors, own_positives, own_negatives])
        (gradient,) = torch.autograd.grad(sorted_vectors, leaf, own_gradient)
        return StepLoss(losses, gradient, num_masked=masked[0].shape[1])

    def of_all(self, vectors: Tensor, ids: np.ndarray, *, num_rows: int) -> Tensor:
        """Return the loss of every row for the texts of all ranks, ordered by role."""
        rows = range(num_rows)
        masked = self._masked(ids[:num_rows], ids[num_rows:], rows=rows)
        return self.row_losses(vectors[:num_rows], vectors[num_rows:], rows=rows, masked=masked)

    def row_losses(self, anchors: Tensor, passages: Tensor, *, rows: range, masked: Sequence[MaskedPairs]) -> Tensor:
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
                    of_chunk = self._cross_entropy(*leaves, rows=chunk, masked=masked[0])
                    if self.section.symmetric:
                        of_chunk = (of_chunk + self._cross_entropy(*leaves[::-1], rows=chunk, masked=masked[1])) / 2
                    of_chunk = of_chunk / len(views)
                    losses[chunk.start - rows.start : chunk.stop - rows.start] += of_chunk.detach()
                    if needs_gradient:
                        of_chunk.sum().backward()  # type: ignore[no-untyped-call]
                if needs_gradient:
                    torch.autograd.backward(view, [leaf.grad for leaf in leaves])
        return losses.detach()

    def _cross_entropy(self, texts: Tensor, candidates: Tensor, *, rows: range, masked: MaskedPairs) -> Tensor:
        logits = texts[rows.start : rows.stop] @ candidates.T / self.section.temperature  # [rows, candidates]
        first, last = np.searchsorted(masked[0], [rows.start, rows.stop])
        if first < last:
            pairs = torch.from_numpy(masked[:, first:last] - np.array([[rows.start], [0]]))
            if logits.is_cuda:
                pairs = pairs.pin_memory()
            indices = tuple(pairs.to(logits.device, non_blocking=True))
            logits = logits.index_put(indices, logits.new_full((), -torch.inf))
        own = torch.arange(rows.start, rows.stop, device=logits.device)
        return functional.cross_entropy(logits, own, reduction="none")

    def _masked(self, anchor_ids: np.ndarray, passage_ids: np.ndarray, *, rows: range) -> tuple[MaskedPairs, ...]:
        """Return the excluded pairs of the rows' anchors and, if symmetric, of the rows' positives."""
        passages = masked_pairs(anchor_ids, passage_ids, rows)
        if not self.section.symmetric:
            return (passages,)
        return passages, masked_pairs(passage_ids[: len(anchor_ids)], anchor_ids, rows)


def by_role(values: Sequence[Any], num_rows: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return the values of all anchors, and of all positives followed by all negatives.

    The values are by microbatch or rank; each has its anchors, then its positives, then its negatives.
    """
    parts = list(zip(values, num_rows, strict=True))
    positives, negatives = [part[num : 2 * num] for part, num in parts], [part[2 * num :] for part, num in parts]
    return [part[:num] for part, num in parts], [*positives, *negatives]


def masked_pairs(ids: np.ndarray, candidates: np.ndarray, rows: range) -> MaskedPairs:
    """Return the candidates relevant to the text of each of these rows, except the row's own: not to be negatives.

    Row i has text i and candidate i; both arrays hold digests of texts. There may be more candidates than texts. A
    candidate is relevant to a text if it is the own candidate of an equal text.
    """
    # only rows whose text or own candidate occurs again can have pairs
    occurrences = np.zeros(len(ids), np.int64)
    for texts in (ids, candidates):
        _, inverse, counts = np.unique(texts, return_inverse=True, return_counts=True)
        occurrences += counts[inverse][: len(ids)]
    chosen = [row for row in rows if occurrences[row] > 2]
    pairs: list[tuple[int, int]] = []
    if chosen:
        relevant: dict[int, set[int]] = defaultdict(set)
        for text, own in zip(ids.tolist(), candidates[: len(ids)].tolist(), strict=True):
            relevant[text].add(own)
        indices: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(candidates.tolist()):
            indices[text].append(index)
        for row in chosen:
            same = (index for text in relevant[int(ids[row])] for index in indices[text] if index != row)
            pairs.extend((row, index) for index in sorted(same))
    return np.array(pairs, np.int64).reshape(-1, 2).T


@dataclass(frozen=True)
class Cosent:
    """CoSENT over all pairs of the step. Every row gets the same loss, so that the step's loss is their mean."""

    similarity: Similarity
    section: EmbeddingSection

    def __call__(self, vectors: Tensor, batches: Sequence[Batch]) -> StepLoss:
        """Return the loss of the step, and the gradient of this rank's vectors. Collective."""
        leaf = vectors.detach().requires_grad_()
        own_sizes = [len(batch.group_sizes) for batch in batches]
        with torch.enable_grad():
            parts = by_role(torch.split(leaf, [len(batch.text_ids) for batch in batches]), own_sizes)
            similarities = self.similarity.of_pairs(torch.cat(parts[0]), torch.cat(parts[1]))  # [rows, sizes]
        num_rows = sum(own_sizes)
        sizes = distributed.gather_objects(num_rows)
        labels = torch.cat([batch.labels for batch in batches])
        scores = torch.cat(distributed.gather_rows(labels, sizes))
        everyone = torch.cat(distributed.gather_rows(similarities, sizes)).requires_grad_()
        with torch.enable_grad():
            loss = self.of_similarities(everyone, scores)
        (similarity_gradient,) = torch.autograd.grad(loss * len(scores), everyone)
        start = sum(sizes[: distributed.rank()])
        (gradient,) = torch.autograd.grad(similarities, leaf, similarity_gradient[start : start + num_rows])
        return StepLoss(loss.detach().expand(num_rows), gradient)

    def of_similarities(self, similarities: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of all pairs, a scalar, from their similarities at every size, [pairs, sizes]."""
        temperature = self.section.temperature
        losses = [cosent(column, scores, temperature=temperature) for column in similarities.unbind(dim=1)]
        return torch.stack(losses).mean()


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
