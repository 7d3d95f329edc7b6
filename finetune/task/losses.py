"""Losses as sums over targets, never means: a mean is taken once, over the whole world."""

import torch
from torch import Tensor
from torch.nn import functional

from finetune.data.batch import IGNORED


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats, summed over the labels that are not IGNORED, as a float32 scalar.

    `labels[b, t]` is what `logits[b, t]` predict: the caller has shifted them.
    """
    # logits  # [batch, length, vocabulary]
    flat = logits.reshape(-1, logits.shape[-1]).to(torch.float32)
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
