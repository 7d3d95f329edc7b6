"""Metrics of classes and numbers, against scikit-learn, and whatever the ranks that measured them."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, ndcg_score

from finetune.task import metrics
from finetune.task.metrics import (
    are_entity_tags,
    class_metrics,
    entity_metrics,
    find_entities,
    multi_label_metrics,
    ranks_among,
    ranks_in,
    regression_metrics,
)


def drawn(*shape, high=4):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(5))


def test_single_label_metrics_equal_those_of_scikit_learn():
    labels, predicted = drawn(57), drawn(57).roll(1)
    metrics = class_metrics(labels.double(), predicted.double(), num_classes=5)  # nothing is of the fifth class
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert metrics["micro_f1"] == pytest.approx(f1_score(labels, predicted, average="micro"))
    assert metrics["mcc"] == pytest.approx(matthews_corrcoef(labels, predicted))


def test_multi_label_metrics_equal_those_of_scikit_learn():
    labels, predicted = drawn(40, 3, high=2), drawn(40, 3, high=2).roll(1, dims=0)
    metrics = multi_label_metrics(labels.double(), predicted.double())
    assert metrics["subset_accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert metrics["micro_f1"] == pytest.approx(f1_score(labels, predicted, average="micro"))


def test_numbers_are_correlated_as_by_scipy_ties_included():
    labels = torch.tensor([[0.0], [1.0], [1.0], [3.0], [4.5], [2.0]], dtype=torch.float64)
    predicted = torch.tensor([[0.5], [0.5], [2.0], [2.5], [4.0], [3.0]], dtype=torch.float64)
    metrics = regression_metrics(labels, predicted)
    pair = (labels[:, 0].numpy(), predicted[:, 0].numpy())
    assert metrics["pearson"] == pytest.approx(pearsonr(*pair).statistic)
    assert metrics["spearman"] == pytest.approx(spearmanr(*pair).statistic)
    assert metrics["mse"] == pytest.approx(3.0 / 6)


def test_correlations_of_several_targets_are_averaged():
    labels = torch.tensor([[0.0, 5.0], [1.0, 3.0], [2.0, 1.0]], dtype=torch.float64)
    predicted = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]], dtype=torch.float64)  # 1 and -1
    assert regression_metrics(labels, predicted)["pearson"] == pytest.approx(0.0)


def test_the_correlation_with_a_constant_is_nan():
    same, other = torch.ones(4, 1, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)[:, None]
    metrics = regression_metrics(other, same)
    assert math.isnan(metrics["pearson"]) and math.isnan(metrics["spearman"])


FOUND = {
    "B-PER I-PER O B-LOC": [(0, 1, "PER"), (3, 3, "LOC")],  # seqeval's own example of get_entities
    "O I-PER I-PER": [(1, 2, "PER")],  # an entity may begin inside
    "B-PER B-PER": [(0, 0, "PER"), (1, 1, "PER")],
    "B-PER I-LOC": [(0, 0, "PER"), (1, 1, "LOC")],  # another type is another entity
    "B-PER I-PER E-PER S-LOC": [(0, 2, "PER"), (3, 3, "LOC")],
    "I-A I-A B-A": [(0, 1, "A"), (2, 2, "A")],
    "E-A I-A": [(0, 0, "A"), (1, 1, "A")],
    "O O": [],
    "B-a-b I-a-b": [(0, 1, "a-b")],
}


@pytest.mark.parametrize("tags", FOUND)
def test_entities_are_found(tags):
    assert list(find_entities(tags.split())) == FOUND[tags]


@pytest.mark.parametrize(
    ("true", "predicted", "score"),
    [("OOOBIIO BIO", "OOBIIIO BIO", 0.5), ("BO", "OO", 0.0)],  # the first is the example of seqeval's README
)
def test_entities_are_scored_like_seqevals(true, predicted, score):
    sentences = enumerate(zip(true.split(), predicted.split(), strict=True))
    records = [
        (row, "OBI".index(one), "OBI".index(other)) for row, pair in sentences for one, other in zip(*pair, strict=True)
    ]
    assert set(entity_metrics(torch.tensor(records), ["O", "B-A", "I-A"]).values()) == {score}


@pytest.mark.parametrize(
    ("names", "are"), [(["O", "B-A", "I-A"], True), (["O", "I-A"], False), (["NOUN", "VERB"], False), (["O"], False)]
)
def test_tags_of_entities_are_known(names, are):
    assert are_entity_tags(names) is are


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
    found = metrics.ranking_metrics(ranks)
    assert found["ndcg_at_10"] == pytest.approx(ndcg_score(relevance, scores, k=10))
    assert found["recall_at_5"] == pytest.approx(np.mean([np.mean(np.array(each) <= 5) for each in ranks]))
    first = [min(each) for each in ranks]
    assert found["mrr_at_10"] == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in first]))


def test_the_earlier_of_equal_scores_ranks_first():
    assert ranks_in(torch.tensor([0.5, 0.5, 0.9, 0.5]), [0, 1, 3]) == [2, 3, 4]


def test_ranking_metrics_are_zero_without_hits_and_nan_without_queries():
    assert set(metrics.ranking_metrics([[11]]).values()) == {0.0}
    assert all(math.isnan(value) for value in metrics.ranking_metrics([]).values())
