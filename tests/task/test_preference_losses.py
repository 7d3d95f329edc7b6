"""Losses of preference tuning equal their papers' formulas, written here with Python's own floats, within 1e-10."""

import math

import pytest
import torch

from finetune.config.sections.task import PreferenceSection
from finetune.task import preference as losses

MARGINS = (-7.0, -0.31, 0.0, 0.02, 4.5, 30.0)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def close(tensor: torch.Tensor, values: list[float]) -> None:
    assert tensor.dtype == torch.float64
    torch.testing.assert_close(tensor, torch.tensor(values, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def doubles(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_margins(function, margins, **section) -> torch.Tensor:
    """Return a loss of pairs whose rejected answers have a score of 0."""
    scores = doubles(margins)
    return function(scores, torch.zeros_like(scores), PreferenceSection(**section))


def test_robust_dpo_is_unbiased_where_pairs_are_flipped():
    margins, share = doubles(MARGINS), 0.2
    section = {"beta": 0.3, "label_smoothing": share}
    expected = [
        (-(1 - share) * math.log(logistic(0.3 * m)) + share * math.log(logistic(-0.3 * m))) / (1 - 2 * share)
        for m in MARGINS
    ]
    close(of_margins(losses.robust_dpo, MARGINS, **section), expected)
    noisy = [of_margins(losses.robust_dpo, (sign * margins).tolist(), **section) for sign in (1, -1)]
    close((1 - share) * noisy[0] + share * noisy[1], of_margins(losses.dpo, MARGINS, beta=0.3).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_one_minus_exp_has_a_finite_gradient_at_both_ends(dtype):
    x = torch.tensor([0.0, -1e-9, -0.5, -0.7, -90.0], dtype=dtype, requires_grad=True)
    value = losses.log_one_minus_exp(x)
    assert value[1:].tolist() == pytest.approx([math.log(-math.expm1(v)) for v in x[1:].tolist()], rel=1e-6)
    value.sum().backward()
    assert torch.isfinite(x.grad).all()
