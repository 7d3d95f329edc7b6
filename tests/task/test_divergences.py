"""Divergences against their formulas in float64, and what stays of a distribution of which few tokens are kept."""

import math

import pytest
import torch

from finetune.config.sections.task import DistillationSection
from finetune.task.divergences import divergence_of, forward_kl, jensen_shannon, reduced, reverse_kl

NAMES = ("forward_kl", "reverse_kl", "jsd")


def log_probabilities(seed, *, shape=(7, 11)):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 3).log_softmax(dim=-1)


def named(name):
    return divergence_of(DistillationSection(teacher="x", divergence=name, jsd_beta=0.3))


def formula(name, teacher, student, *, beta=0.3):
    """Return the divergences as their papers write them, token after token."""
    found = []
    for p, q in zip(teacher.exp().tolist(), student.exp().tolist(), strict=True):
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

        def kl(one, other):
            return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

        found.append({"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)})
    return torch.tensor([each[name] for each in found], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_equals_its_formula(name):
    teacher, student = log_probabilities(0), log_probabilities(1)
    torch.testing.assert_close(named(name)(teacher, student), formula(name, teacher, student), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_equal_models_are_no_distance_apart_and_do_not_move(name):
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    found = named(name)(logits.detach().log_softmax(dim=-1), logits.log_softmax(dim=-1)).sum()
    found.backward()
    assert abs(float(found)) < 1e-12
    assert float(logits.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right(name):
    teacher = log_probabilities(3, shape=(3, 6))
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    kept = teacher.topk(2, dim=1).indices
    assert torch.autograd.gradcheck(lambda z: named(name)(teacher, z.log_softmax(-1)), [logits])
    assert torch.autograd.gradcheck(
        lambda z: named(name)(reduced(teacher, kept), reduced(z.log_softmax(-1), kept)), [logits]
    )


def test_kept_tokens_and_the_rest_are_a_distribution():
    whole = log_probabilities(5)
    kept = whole.topk(3, dim=1).indices
    few = reduced(whole, kept).exp()
    assert few.shape == (7, 4)
    torch.testing.assert_close(few.sum(dim=1), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(few[:, :3], whole.exp().gather(1, kept))


def test_the_divergence_of_few_categories_is_never_above_that_of_all():
    teacher, student = log_probabilities(6), log_probabilities(7)
    kept = teacher.topk(4, dim=1).indices
    for divergence in (forward_kl, reverse_kl):
        assert bool((divergence(reduced(teacher, kept), reduced(student, kept)) <= divergence(teacher, student)).all())


def test_a_token_that_the_teacher_rules_out_costs_nothing_forwards():
    teacher = torch.tensor([[0.0, -torch.inf]])
    student = torch.tensor([[0.5, 0.5]]).log()
    assert float(forward_kl(teacher, student)) == pytest.approx(0.6931, abs=1e-4)
    assert float(reverse_kl(teacher, student)) == float("inf")
    assert 0 < float(jensen_shannon(teacher, student, beta=0.5)) < 0.7
