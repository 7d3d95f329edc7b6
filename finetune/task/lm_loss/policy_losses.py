"""Losses of tokens by their log-probabilities: the cross-entropy, and those of policy gradients.

Each is a function from the log-probabilities of the targets, their labels, both [targets], and the batch, whose extras
hold the numbers of the rows by column, to the loss of each target, [targets].
"""

import torch
from torch import Tensor

from finetune.data.batch import Batch

CLIP_RANGE = 0.2
"""How far the ratio of probabilities may be from 1 where it is clipped."""


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
    """Return the same, where a ratio beyond the clip range gains nothing (Schulman et al., 2017, arXiv:1707.06347)."""
    ratio, advantages = _ratio(log_probabilities, batch), batch.extras["advantages"]
    clipped = ratio.clamp(1.0 - CLIP_RANGE, 1.0 + CLIP_RANGE)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ratio(log_probabilities: Tensor, batch: Batch) -> Tensor:
    return (log_probabilities - batch.extras["old_log_probabilities"]).exp()
