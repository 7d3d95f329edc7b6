"""How far a student's probabilities are from its teacher's, token by token.

All take log-probabilities over the same categories, [targets, categories], and return the divergences, [targets].
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from finetune.config.sections.task import DistillationSection

Divergence = Callable[[Tensor, Tensor], Tensor]
"""From the teacher's and the student's log-probabilities to divergences."""


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) = sum p (log p - log q) (Hinton et al., 2015, arXiv:1503.02531)."""
    return _relative_entropy(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(student || teacher) = sum q (log q - log p) (Gu et al., 2023, arXiv:2306.08543)."""
    return _relative_entropy(student, teacher)


def jensen_shannon(teacher: Tensor, student: Tensor, *, beta: float) -> Tensor:
    """Return beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    The generalised Jensen-Shannon divergence (Agarwal et al., 2023, arXiv:2306.13649, equation 3).
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _relative_entropy(teacher, mixture) + (1 - beta) * _relative_entropy(student, mixture)


def divergence_of(section: DistillationSection) -> Divergence:
    """Return the divergence that the section names."""
    named: Mapping[str, Divergence] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jensen_shannon, beta=section.jsd_beta),
    }
    return named[section.divergence]


def reduced(log_probabilities: Tensor, kept: Tensor) -> Tensor:
    """Return the log-probabilities of the kept tokens and, behind them, of all others together.

    With kept tokens i1 ... ik it is `log p[i1] ... log p[ik], log sum of p over the others`: a distribution over k + 1
    categories. `kept` is [targets, k], the result [targets, k + 1].
    """
    others = log_probabilities.scatter(1, kept, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probabilities.gather(1, kept), others], dim=1)


def _relative_entropy(one: Tensor, other: Tensor) -> Tensor:
    """Return sum exp(one) (one - other); what has no probability counts for nothing."""
    terms = one.exp() * (one - other)
    return torch.where(one == -torch.inf, 0.0, terms).sum(dim=1)
