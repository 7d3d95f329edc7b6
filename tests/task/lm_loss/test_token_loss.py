"""Summed losses against the formula in float64, and independence of how a batch is cut."""

import math

import pytest
import torch

from finetune.data.batch import IGNORED
from finetune.task.lm_loss.token_loss import TokenLoss, cross_entropy_sum
from finetune.task.metrics import perplexity, token_metrics


def random_batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 9, 50, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, 50, (6, 9), generator=generator)
    labels[torch.rand(6, 9, generator=generator) < 0.4] = IGNORED
    return logits, labels


def formula(logits, labels):
    """Return the loss as the definition has it, one target after the other, in float64."""
    total = 0.0
    for row, row_labels in zip(logits.double(), labels, strict=True):
        for scores, label in zip(row, row_labels.tolist(), strict=True):
            if label != IGNORED:
                total += float(torch.log(torch.exp(scores).sum()) - scores[label])
    return total


def test_the_sum_equals_the_formula():
    logits, labels = random_batch()
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(formula(logits, labels), rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels = random_batch(torch.bfloat16)
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(formula(logits, labels), rel=1e-6)


def test_a_batch_without_targets_has_loss_and_gradient_zero():
    logits, labels = random_batch()
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert float(logits.grad.abs().max()) == 0.0


def test_metrics_are_means_over_all_targets():
    metrics = token_metrics({"loss_sum": 6.0, "num_targets": 3.0, "num_correct": 2.0})
    assert metrics == {"loss": 2.0, "perplexity": math.exp(2.0), "token_accuracy": 2 / 3}
    assert perplexity(1e6) == math.inf
    assert math.isnan(token_metrics({"loss_sum": 0.0, "num_targets": 0.0, "num_correct": 0.0})["loss"])


def whole_formula(logits, labels, *, label_smoothing, z_loss):
    """Return the smoothed loss with its z-loss, one target after the other, in float64."""
    total = 0.0
    for scores, label in zip(logits.double().flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != IGNORED:
            log_z = float(torch.log(torch.exp(scores).sum()))
            wanted = torch.full((len(scores),), label_smoothing / len(scores), dtype=torch.float64)
            wanted[label] += 1 - label_smoothing
            total += float((wanted * (log_z - scores)).sum()) + z_loss * log_z**2
    return total


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_smoothing_and_z_loss_equal_the_formula(label_smoothing, z_loss):
    logits, labels = random_batch()
    sums = TokenLoss(label_smoothing, z_loss).sums(logits, labels)
    expected = whole_formula(logits, labels, label_smoothing=label_smoothing, z_loss=z_loss)
    assert sums["loss_sum"].item() == pytest.approx(expected, rel=1e-6)
    assert sums["cross_entropy"].item() == pytest.approx(formula(logits, labels), rel=1e-6)
