import numpy as np
import pytest
import torch

from finetune.config.sections.task import EmbeddingSection
from finetune.task.embedding import similarity_losses
from finetune.task.embedding.similarity_losses import InfoNce, Similarity, cosent


@pytest.mark.parametrize("scores", [[0.1, 0.9, 0.5, 0.5, 0.0], [0.3] * 5, [5.0, 4.0, 3.0, 2.0, 1.0]])
def test_cosent_is_the_sum_over_all_pairs_of_other_scores(scores):
    torch.manual_seed(0)
    similarities = torch.randn(5, dtype=torch.float64, requires_grad=True)
    terms = [(similarities[j] - similarities[i]) / 0.05 for i in range(5) for j in range(5) if scores[i] > scores[j]]
    expected = torch.stack([torch.zeros((), dtype=torch.float64), *terms]).logsumexp(0)
    found = cosent(similarities, torch.tensor(scores), temperature=0.05)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, similarities)
    if terms:
        (wanted,) = torch.autograd.grad(expected, similarities)
        torch.testing.assert_close(gradient, wanted)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_chunks_of_rows_change_nothing(monkeypatch, symmetric):
    torch.manual_seed(0)
    loss = InfoNce(Similarity(sizes=(2,)), EmbeddingSection(temperature=0.1, symmetric=symmetric)).row_losses
    masked = (np.array([[0, 0, 5], [1, 5, 2]]),) * 2
    vectors = torch.randn(6, 4), torch.randn(9, 4)
    results = []
    for most in (1 << 26, 20):
        monkeypatch.setattr(similarity_losses, "_MAX_LOGITS", most)
        leaves = [each.clone().requires_grad_() for each in vectors]
        losses = loss(*leaves, rows=range(0, 6), masked=masked)
        results.append((losses, *(each.grad for each in leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    parts = [loss(*vectors, rows=rows, masked=masked) for rows in (range(0, 2), range(2, 6))]
    torch.testing.assert_close(torch.cat(parts), results[0][0])


def test_a_matryoshka_size_is_the_renormalized_prefix_of_the_vectors():
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    found = Similarity(sizes=(2,)).of_pairs(first, second)
    cosines = [torch.cosine_similarity(first[:, :size], second[:, :size]) for size in (8, 2)]
    torch.testing.assert_close(found, torch.stack(cosines, dim=1))
    products = Similarity(normalize=False).of_pairs(first, second)
    torch.testing.assert_close(products[:, 0], (first * second).sum(dim=1))
