"""Losses of preference tuning: pure functions of log-probabilities, in whatever float type these are.

Written for chosen `y_w` and rejected `y_l` answers to a prompt `x`, `s` being the logistic function. The ratio of an
answer is `log p(y|x) - log p_ref(y|x)`, summed over its tokens; `p` is trained, `p_ref` frozen. Tensors are [pairs].
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from finetune.config.sections.task import PreferenceSection


def dpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-(1 - e) log s(beta m) - e log s(-beta m)` of the difference `m` of both ratios.

    DPO: Rafailov et al., 2023, arXiv:2305.18290, equation 7; with label smoothing e it is conservative DPO (Mitchell,
    2023, "A note on DPO with noisy preferences"), of which a share e of the pairs is the wrong way round. Of summed
    log-probabilities instead of ratios, it is CPO's first term (Xu et al., 2024, arXiv:2401.08417, equation 3).
    """
    beta, smoothing, margin = section.beta, section.label_smoothing, chosen - rejected
    return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)


def robust_dpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e)`, unbiased where a share e is flipped.

    Robust DPO: Chowdhury et al., 2024, arXiv:2403.00409, equation 13.
    """
    beta, smoothing, margin = section.beta, section.label_smoothing, chosen - rejected
    unflipped = -(1 - smoothing) * logsigmoid(beta * margin) + smoothing * logsigmoid(-beta * margin)
    return unflipped / (1 - 2 * smoothing)


def hinge(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `max(0, 1 - beta m)` of the difference `m` of both ratios.

    SLiC as a loss of ratios: Liu et al., 2023, arXiv:2309.06657, equation 10 (norm), beta there gamma.
    """
    return torch.relu(1 - section.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `(m - 1 / (2 tau))^2` of the difference `m` of both ratios, each divided by the tokens of its answer.

    IPO: Azar et al., 2023, arXiv:2310.12036, equation 17, tau here beta. The paper does not mention the division; its
    authors confirmed it to TRL, which divides likewise.
    """
    return (chosen - rejected - 1 / (2 * section.beta)) ** 2


def orpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-lambda log s(log(odds(y_w) / odds(y_l)))`, odds being `p / (1 - p)`, from mean log-probabilities.

    ORPO's second term: Hong et al., 2024, arXiv:2403.07691, equations 4, 6 and 7, lambda here beta.
    """
    return section.beta * -logsigmoid((chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected)))


def simpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-log s(beta (c - r) - gamma)` from mean log-probabilities of a token, c and r.

    SimPO: Meng et al., 2024, arXiv:2405.14734, equation 6.
    """
    return -logsigmoid(section.beta * (chosen - rejected) - section.target_margin)


def apo_zero(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `1 - s(beta r_w) + s(beta r_l)` of both ratios: each answer moves by itself, not only their difference.

    APO-zero, for chosen answers that are better than the model's own: D'Oosterlinck et al., 2024, arXiv:2408.06266. The
    1 makes the loss positive, as in TRL.
    """
    return 1 - torch.sigmoid(section.beta * chosen) + torch.sigmoid(section.beta * rejected)


def kto(ratio: Tensor, is_good: Tensor, reference_point: Tensor, section: PreferenceSection) -> Tensor:
    """Return `w_D (1 - s(beta (ratio - z)))` of good answers and `w_U (1 - s(beta (z - ratio)))` of bad ones.

    KTO: Ethayarajh et al., 2024, arXiv:2402.01306, equation 8. All are [answers]; z, a scalar without gradient,
    is how far the model is from its reference: see `reference_point`.
    """
    sign = torch.where(is_good, 1.0, -1.0).to(ratio.dtype)
    weight = torch.where(is_good, section.desirable_weight, section.undesirable_weight).to(ratio.dtype)
    return weight * (1 - torch.sigmoid(section.beta * sign * (ratio - reference_point)))


def reference_point(ratio_sum: Tensor, num_answers: Tensor) -> Tensor:
    """Return `max(0, mean ratio)` of answers that belong to other prompts: KTO's estimate of the divergence, a scalar.

    Ethayarajh et al., 2024, arXiv:2402.01306, section 4.1 (there over a microbatch, here over a whole step).
    """
    return (ratio_sum / num_answers).clamp(min=0)


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """Return `-log s(r_w - r_l - m) + c (r_w + r_l)^2` of both answers' scores.

    Bradley and Terry, 1952, as in Ouyang et al., 2022, arXiv:2203.02155, equation 1; the margin m is that of Llama 2
    (Touvron et al., 2023, arXiv:2307.09288, equation 2), centering that of Eisenstein et al., 2023, arXiv:2312.09244.
    """
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


def log_one_minus_exp(log_probability: Tensor) -> Tensor:
    """Return `log(1 - exp(x))` for x < 0, exact near 0 and far from it, with a finite gradient.

    Maechler, 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    largest = -torch.finfo(log_probability.dtype).tiny
    x = log_probability.clamp(max=largest)
    is_near = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
    return torch.where(is_near, near, far)
