"""Losses on the similarities of vectors: InfoNCE and CoSENT over all rows of a step, and the squared error of a cosine.

Each is the mean over the sizes that are trained (Matryoshka: Kusupati et al., 2022, arXiv:2205.13147): the whole
vectors, and their first numbers as vectors of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from finetune.task.embedding.duplicates import MaskedPairs

_MAX_LOGITS = 1 << 26
"""Similarities that are computed at once."""


@dataclass(frozen=True)
class Similarity:
    """How vectors are compared, and at which sizes."""

    normalize: bool = True
    sizes: tuple[int, ...] = ()  # below the whole one

    def views(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the vectors as they are compared, whole and then cut to each size."""
        whole = vectors[0].shape[-1]
        for size in dict.fromkeys((whole, *self.sizes)):
            cut = (each[..., :size] for each in vectors)
            yield tuple(functional.normalize(each, dim=-1) if self.normalize else each for each in cut)

    def of_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the similarity of each row of both at each size, [rows, sizes]."""
        return torch.stack([(one * other).sum(dim=-1) for one, other in self.views(first, second)], dim=1)


@dataclass(frozen=True)
class InfoNce:
    """Cross-entropy of finding the own passage among all (van den Oord et al., 2018, arXiv:1807.03748).

    With `symmetric`, the mean of that and of finding the own anchor among all.
    """

    similarity: Similarity
    temperature: float
    symmetric: bool = False

    def __call__(self, anchors: Tensor, passages: Tensor, *, rows: range, masked: Sequence[MaskedPairs]) -> Tensor:
        """Return the loss of these rows, float32 [rows], and add gradients to both tensors where they require them.

        Row i has anchor i and passage i; further passages are negatives of all rows. `masked` are the pairs that are
        left out, of the rows with passages and, if symmetric, of the rows with anchors. Works in chunks of rows.
        """
        losses = anchors.new_zeros(len(rows))
        needs_gradient = anchors.requires_grad
        with torch.set_grad_enabled(needs_gradient):
            views = list(self.similarity.views(anchors, passages))
            for view in views:
                leaves = [each.detach().requires_grad_(needs_gradient) for each in view]
                for chunk in _chunks(rows, num_columns=len(passages)):
                    found = self._losses(*leaves, rows=chunk, masked=masked) / len(views)
                    losses[chunk.start - rows.start : chunk.stop - rows.start] += found.detach()
                    if needs_gradient:
                        found.sum().backward()  # type: ignore[no-untyped-call]
                if needs_gradient:
                    torch.autograd.backward(view, [each.grad for each in leaves])
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
        places = masked.places(rows, device=logits.device)
        if places is not None:
            logits = logits.index_put(places, logits.new_full((), -torch.inf))
        own = torch.arange(rows.start, rows.stop, device=logits.device)
        return functional.cross_entropy(logits, own, reduction="none")


def _chunks(rows: range, *, num_columns: int) -> Iterator[range]:
    size = max(1, _MAX_LOGITS // max(1, num_columns))
    for start in range(rows.start, rows.stop, size):
        yield range(start, min(start + size, rows.stop))


def cosent(similarities: Tensor, scores: Tensor, *, temperature: float) -> Tensor:
    """Return CoSENT's loss, a scalar: log(1 + sum of exp((s_j - s_i) / T) over pairs of which i has the higher score).

    Both are [pairs] (Su, 2022, https://kexue.fm/archives/8847). By prefix sums over the pairs in the order of their
    scores: n log n, where the sum has n squared terms.
    """
    ordered, order = scores.sort()
    scaled = similarities[order] / temperature
    below = torch.searchsorted(ordered, ordered)  # of each pair, how many have a lower score
    prefix = scaled.logcumsumexp(dim=0)
    terms = prefix[(below - 1).clamp(min=0)] - scaled
    terms = terms.masked_fill(below == 0, -torch.inf)
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)
