"""Losses of preference tuning equal their papers' formulas, written here with Python's own floats, within 1e-10."""

import math

import pytest
import torch

from finetune.config.sections.task import PreferenceSection
from finetune.task import preference as losses
from finetune.task.answer_pairs import bradley_terry

MARGINS = (-7.0, -0.31, 0.0, 0.02, 4.5, 30.0)
MEANS = ((-0.9, -1.4), (-2.3, -0.01), (-1e-6, -3.0), (-40.0, -0.7))


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


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_equation_7_and_conservative_with_smoothing(smoothing):
    expected = [
        -(1 - smoothing) * math.log(logistic(0.3 * m)) - smoothing * math.log(logistic(-0.3 * m)) for m in MARGINS
    ]
    close(of_margins(losses.dpo, MARGINS, beta=0.3, label_smoothing=smoothing), expected)


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


def test_hinge_is_that_of_slic():
    close(of_margins(losses.hinge, MARGINS, beta=0.3), [max(0.0, 1 - 0.3 * m) for m in MARGINS])


def test_ipo_is_equation_17():
    close(of_margins(losses.ipo, MARGINS, beta=0.4), [(m - 1 / 0.8) ** 2 for m in MARGINS])


def test_orpo_is_equations_4_6_and_7():
    def odds(mean: float) -> float:
        return math.exp(mean) / -math.expm1(mean)

    expected = [0.3 * -math.log(logistic(math.log(odds(c) / odds(r)))) for c, r in MEANS]
    chosen, rejected = doubles(MEANS).T
    close(losses.orpo(chosen, rejected, PreferenceSection(beta=0.3)), expected)


def test_simpo_is_equation_6():
    chosen, rejected = doubles(MEANS).T
    expected = [-math.log(logistic(2.0 * c - 2.0 * r - 0.5)) for c, r in MEANS]
    close(losses.simpo(chosen, rejected, PreferenceSection(beta=2.0, target_margin=0.5)), expected)


def test_cpo_is_equation_3():
    chosen, rejected = doubles(MEANS).T
    close(
        losses.dpo(chosen, rejected, PreferenceSection(loss="cpo", beta=0.3)),
        [-math.log(logistic(0.3 * (c - r))) for c, r in MEANS],
    )


def test_apo_zero_raises_the_chosen_and_lowers_the_rejected_answer():
    chosen, rejected = doubles(MARGINS).requires_grad_(), doubles(MARGINS[::-1]).requires_grad_()
    loss = losses.apo_zero(chosen, rejected, PreferenceSection(loss="apo_zero", beta=0.3))
    expected = [1 - logistic(0.3 * c) + logistic(0.3 * r) for c, r in zip(MARGINS, MARGINS[::-1], strict=True)]
    close(loss, expected)
    loss.sum().backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()


def test_kto_is_equation_8():
    is_good, point = [True, False, True, False, False, True], 0.7
    expected = [
        1.5 - 1.5 * logistic(0.3 * (ratio - point)) if good else 0.5 - 0.5 * logistic(0.3 * (point - ratio))
        for ratio, good in zip(MARGINS, is_good, strict=True)
    ]
    section = PreferenceSection(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    loss = losses.kto(doubles(MARGINS), torch.tensor(is_good), doubles(point), section)
    close(loss, expected)


def test_the_reference_point_is_a_mean_that_is_never_negative():
    assert losses.reference_point(doubles(6.0), doubles(4.0)).item() == 1.5
    assert losses.reference_point(doubles(-6.0), doubles(4.0)).item() == 0.0


def test_bradley_terry_with_margin_and_centering():
    chosen, rejected, margins = doubles([1.2, -0.4]), doubles([0.3, 0.9]), doubles([0.5, 1.0])
    expected = [-math.log(logistic(c - r - m)) + 0.01 * (c + r) ** 2 for c, r, m in ((1.2, 0.3, 0.5), (-0.4, 0.9, 1.0))]
    close(bradley_terry(chosen, rejected, margin=margins, centering=0.01), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_one_minus_exp_has_a_finite_gradient_at_both_ends(dtype):
    x = torch.tensor([0.0, -1e-9, -0.5, -0.7, -90.0], dtype=dtype, requires_grad=True)
    value = losses.log_one_minus_exp(x)
    assert value[1:].tolist() == pytest.approx([math.log(-math.expm1(v)) for v in x[1:].tolist()], rel=1e-6)
    value.sum().backward()
    assert torch.isfinite(x.grad).all()
