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
"""The maximum number of scores in memory."""


def ranking_metrics(ranks: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the means over the queries, each given by the ranks, from 1, of its relevant candidates.

    >>> ranking_metrics([[1], [3]])["recall_at_1"]
    0.5
    """
    values = [_metrics_of_query(np.sort(np.asarray(query_ranks))) for query_ranks in ranks]
    names = [*(f"recall_at_{k}" for k in RECALL_AT), f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}"]
    if not values:
        return dict.fromkeys(names, math.nan)
    return dict(zip(names, np.mean(values, axis=0).tolist(), strict=True))


def _metrics_of_query(ranks: np.ndarray) -> tuple[float, ...]:
    recalls = [float((ranks <= k).mean()) for k in RECALL_AT]
    within = ranks[ranks <= CUTOFF]
    ideal = (1 / np.log2(np.arange(2, min(len(ranks), CUTOFF) + 2))).sum()
    return (*recalls, float((1 / np.log2(within + 1)).sum() / ideal), float(1 / within[0]) if len(within) else 0.0)


def ranks_among(queries: Tensor, candidates: Tensor, relevant: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield, for each query, the ranks of its relevant candidates by the dot products of the vectors.

    `queries` are [queries, dimensions], `candidates` [candidates, dimensions]. Works in chunks of queries.
    """
    size = max(1, _MAX_SCORES // max(1, len(candidates)))
    for start in range(0, len(queries), size):
        scores = queries[start : start + size] @ candidates.T
        for query_scores, indices in zip(scores, relevant[start : start + size], strict=True):
            yield ranks_in(query_scores, indices)


def ranks_in(scores: Tensor, indices: Sequence[int]) -> list[int]:
    """Return the ranks of these indices among the scores, [candidates].

    >>> ranks_in(torch.tensor([0.5, 0.9, 0.5]), [2, 1])
    [3, 1]
    """
    positions = torch.as_tensor(list(indices))
    values = scores[positions][:, None]
    is_earlier = torch.arange(len(scores))[None] < positions[:, None]
    is_ranked_higher = (scores[None] > values) | ((scores[None] == values) & is_earlier)
    ranks: list[int] = (is_ranked_higher.sum(dim=1) + 1).tolist()
    return ranks
