"""Metrics of rankings: recall, nDCG and the mean reciprocal rank.

nDCG is that of Järvelin and Kekäläinen (2002, https://doi.org/10.1145/582415.582418) with gains of 0 and 1. Of equal
scores, the earlier candidate ranks first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
CUTOFF = 10
_MAX_SCORES = 1 << 25
"""Scores that are compared at once."""


def ranking_metrics(ranks: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the means over the queries; each is given as the ranks of what is right for it, from 1.

    >>> ranking_metrics([[1], [3]])["recall_at_1"]
    0.5
    """
    each = [_metrics_of_query(np.sort(np.asarray(found))) for found in ranks]
    names = [*(f"recall_at_{k}" for k in RECALL_AT), f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}"]
    if not each:
        return dict.fromkeys(names, math.nan)
    return dict(zip(names, np.mean(each, axis=0).tolist(), strict=True))


def _metrics_of_query(ranks: np.ndarray) -> tuple[float, ...]:
    recalls = [float((ranks <= k).mean()) for k in RECALL_AT]
    within = ranks[ranks <= CUTOFF]
    ideal = (1 / np.log2(np.arange(2, min(len(ranks), CUTOFF) + 2))).sum()
    return (*recalls, float((1 / np.log2(within + 1)).sum() / ideal), float(1 / within[0]) if len(within) else 0.0)


def ranks_among(queries: Tensor, candidates: Tensor, right: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield of each query the ranks of the candidates that are right for it, by the products of the vectors.

    `queries` are [queries, dimensions], `candidates` [candidates, dimensions]. Works in chunks of queries.
    """
    size = max(1, _MAX_SCORES // max(1, len(candidates)))
    for start in range(0, len(queries), size):
        scores = queries[start : start + size] @ candidates.T
        for own, places in zip(scores, right[start : start + size], strict=True):
            yield ranks_in(own, places)


def ranks_in(scores: Tensor, places: Sequence[int]) -> list[int]:
    """Return the ranks of these places among the scores, [candidates].

    >>> ranks_in(torch.tensor([0.5, 0.9, 0.5]), [2, 1])
    [3, 1]
    """
    chosen = torch.as_tensor(list(places))
    values = scores[chosen][:, None]
    is_before = torch.arange(len(scores))[None] < chosen[:, None]
    is_ranked_before = (scores[None] > values) | ((scores[None] == values) & is_before)
    ranks: list[int] = (is_ranked_before.sum(dim=1) + 1).tolist()
    return ranks
