"""Losses of predicted tokens: the cross-entropy, label smoothing and z-loss as sums over targets; policy gradients.

A loss by log-probabilities is a function from these, their labels, both [targets], and the batch, whose
extras hold the numbers of the rows by column, to the loss of each target, [targets].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from finetune.data.batch import IGNORED, Batch


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats, summed over the labels that are not IGNORED, as a float32 scalar.

    `logits[b, t]`, [vocabulary], predict `labels[b, t]`: the caller has shifted them.
    """
    flat = logits.reshape(-1, logits.shape[-1]).to(torch.float32)
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class TokenLoss:
    """The training loss of predicted tokens: cross-entropy, optionally with label smoothing and z-loss.

    At a target with logits z over V tokens, correct token y, and log p = z - log sum exp z, it is
    `-(1 - label_smoothing) log p[y] - label_smoothing / V sum log p + z_loss (log sum exp z)^2`
    (Szegedy et al., 2015, arXiv:1512.00567; Chowdhery et al., 2022, arXiv:2204.02311).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Return whether it equals the cross-entropy."""
        return self.label_smoothing == self.z_loss == 0.0

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return `loss_sum` over the targets and, unless it is that, the detached sum of the plain `cross_entropy`."""
        plain = cross_entropy_sum(logits, labels)
        if self.is_plain:
            return {"loss_sum": plain}
        is_target = labels != IGNORED  # [batch, length]; a mask, since indexing would synchronize with the GPU
        fp32_logits = logits.to(torch.float32)
        denominators = fp32_logits.logsumexp(dim=-1)
        loss = plain + self.z_loss * denominators.square().where(is_target, 0.0).sum()
        if self.label_smoothing:
            uniform = (denominators - fp32_logits.mean(dim=-1)).where(is_target, 0.0).sum()
            loss = loss + self.label_smoothing * (uniform - plain)
        return {"loss_sum": loss, "cross_entropy": plain.detach()}


CLIP_RANGE = 0.2
"""How far the ratio of probabilities may be from 1 before it is clipped."""


def cross_entropy(log_probabilities: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    """Return the negative log-probabilities."""
    return -log_probabilities


def policy_gradient(log_probabilities: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    """Return the negative log-probabilities times `advantages`: REINFORCE (Williams, 1992)."""
    return -log_probabilities * batch.extras["advantages"]


def importance_sampling(log_probabilities: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    """Return the negative ratios to `old_log_probabilities`, of the model that sampled, times `advantages`."""
    return -_ratio(log_probabilities, batch) * batch.extras["advantages"]


def clipped_importance_sampling(log_probabilities: Tensor, labels: Tensor, batch: Batch) -> Tensor:
    """As `importance_sampling`, with clipped ratios (Schulman et al., 2017, arXiv:1707.06347)."""
    ratio, advantages = _ratio(log_probabilities, batch), batch.extras["advantages"]
    clipped = ratio.clamp(1.0 - CLIP_RANGE, 1.0 + CLIP_RANGE)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ratio(log_probabilities: Tensor, batch: Batch) -> Tensor:
    return (log_probabilities - batch.extras["old_log_probabilities"]).exp()
