"""Scores of a query and its passages, each read together."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from finetune.errors import DataError
from tests.refusals import pinned
from tests.task.embedding.conftest import ROWS, SCORED, SIZES

GROUPS = [row for row in ROWS if row["negatives"]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)).eval()


def encoded(task, rows):
    return [replace(each, sample_id=number) for number, each in enumerate(task.encode(rows))]


def scores_one_by_one(model, tokenizer, rows):
    """Return the scores of each row's passages, the positive first."""
    with torch.no_grad():
        return [
            torch.stack(
                [
                    model(**tokenizer(row["anchor"], each, return_tensors="pt")).logits[0, 0]
                    for each in (row["positive"], *row["negatives"])
                ]
            )
            for row in rows
        ]


@pytest.mark.parametrize("loss", ["listwise", "pairwise"])
def test_a_row_is_compared_with_its_own_negatives(reranking, tokenizer, model, loss):
    task = reranking(loss=loss)
    samples = encoded(task, GROUPS)
    each = scores_one_by_one(model, tokenizer, GROUPS)
    if loss == "listwise":
        expected = sum(cross_entropy(scores[None], torch.tensor([0])) for scores in each)
    else:
        expected = sum(-torch.nn.functional.logsigmoid(scores[0] - scores[1:]).mean() for scores in each)
    with torch.no_grad():
        whole = task.loss_sums(model, task.collate(samples))["loss_sum"]
        parts = [task.loss_sums(model, task.collate(cut))["loss_sum"] for cut in (samples[:1], samples[1:])]
    assert whole.item() == pytest.approx(expected.item(), rel=1e-4)
    assert sum(parts).item() == pytest.approx(expected.item(), rel=1e-4)


def test_metrics_rank_a_positive_after_equal_scores(reranking, tokenizer, model):
    task = reranking()
    samples = encoded(task, GROUPS)
    with torch.no_grad():
        outputs = [task.evaluate_batch(model, task.collate(cut)) for cut in (samples[:2], samples[2:])]
    records = torch.cat([each.records for each in outputs])
    sums = {name: sum(each.sums[name].item() for each in outputs) for name in outputs[0].sums}
    records = records[records[:, 0].argsort(stable=True)]
    found = task.metrics(sums, records)
    ranks = [1 + int((each[1:] >= each[0]).sum()) for each in scores_one_by_one(model, tokenizer, GROUPS)]
    assert found["mrr_at_10"] == pytest.approx(sum(1 / rank for rank in ranks) / len(ranks))
    flat = records.clone()
    flat[:, 1] = 0.5
    assert task.metrics(sums, flat)["recall_at_1"] == 0.0


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_scores_are_trained_as_they_are(reranking, tokenizer, model, loss):
    task = reranking(loss=loss)
    samples = encoded(task, SCORED)
    with torch.no_grad():
        found = torch.stack(
            [model(**tokenizer(r["text"], r["text_pair"], return_tensors="pt")).logits[0, 0] for r in SCORED]
        )
        batch = task.collate(samples)
        loss_sum = task.loss_sums(model, batch)["loss_sum"].item()
        output = task.evaluate_batch(model, batch)
    wanted = torch.tensor([row["score"] for row in SCORED])
    expected = (
        binary_cross_entropy(found.sigmoid(), wanted, reduction="sum")
        if loss == "bce"
        else (found - wanted).square().sum()
    )
    assert loss_sum == pytest.approx(expected.item(), rel=1e-4)
    metrics = task.metrics({name: value.item() for name, value in output.sums.items()}, output.records)
    assert metrics["loss"] == pytest.approx(loss_sum / len(SCORED), rel=1e-6)
    assert not math.isnan(metrics["spearman"])
    assert task.label_text(samples[0]) == "score 0.9"


def test_rows_that_cannot_be_trained_on(reranking):
    task = reranking()
    assert task.encode([{"anchor": "two", "positive": "two", "negatives": []}]) == [None]
    (wrong,) = task.encode(SCORED[:1])
    assert isinstance(wrong, DataError)
    assert task.head_values["num_labels"] == 1
    (high,) = reranking(loss="bce").encode([{**SCORED[0], "score": 1.5}])
    pinned(high, "0 to 1")


def test_a_filler_has_no_records(reranking, model):
    task = reranking()
    dummy = task.dummy_batch(encoded(task, GROUPS)[0])
    with torch.no_grad():
        output = task.evaluate_batch(model, dummy)
    assert (dummy.num_targets, output.records, dict(output.sums)) == (0, None, {})
