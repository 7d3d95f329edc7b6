import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from finetune.task.embedding import ranking_metrics
from finetune.task.embedding.ranking_metrics import ranks_among, ranks_in


def test_ranks_and_ndcg_equal_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    queries, candidates = torch.from_numpy(rng.normal(size=(20, 4))), torch.from_numpy(rng.normal(size=(30, 4)))
    right = [sorted(rng.choice(30, size=rng.integers(1, 13), replace=False).tolist()) for _ in range(20)]
    scores = (queries @ candidates.T).numpy()
    relevance = np.array([[place in each for place in range(30)] for each in right], float)
    ranks = list(ranks_among(queries, candidates, right))
    assert ranks == [
        [1 + int((row > row[place]).sum()) for place in each] for row, each in zip(scores, right, strict=True)
    ]
    found = ranking_metrics.ranking_metrics(ranks)
    assert found["ndcg_at_10"] == pytest.approx(ndcg_score(relevance, scores, k=10))
    assert found["recall_at_5"] == pytest.approx(np.mean([np.mean(np.array(each) <= 5) for each in ranks]))
    first = [min(each) for each in ranks]
    assert found["mrr_at_10"] == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in first]))


def test_chunks_change_nothing(monkeypatch):
    queries, candidates = torch.randn(7, 3), torch.randn(5, 3)
    right = [[0], [1, 2], [3], [4], [0, 4], [2], [1]]
    whole = list(ranks_among(queries, candidates, right))
    monkeypatch.setattr(ranking_metrics, "_MAX_SCORES", 10)
    assert list(ranks_among(queries, candidates, right)) == whole


def test_the_earlier_of_equal_scores_ranks_first():
    assert ranks_in(torch.tensor([0.5, 0.5, 0.9, 0.5]), [0, 1, 3]) == [2, 3, 4]


def test_ranking_metrics_are_zero_without_hits_and_nan_without_queries():
    assert set(ranking_metrics.ranking_metrics([[11]]).values()) == {0.0}
    assert all(math.isnan(value) for value in ranking_metrics.ranking_metrics([]).values())
