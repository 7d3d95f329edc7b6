"""Sums that may be added up over batches and ranks, and the metrics that they amount to."""

import math
from collections.abc import Mapping

from torch import Tensor

from finetune.data.batch import IGNORED
from finetune.task.losses import cross_entropy_sum


def token_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the summed loss, the number of targets and how many of them have the highest logit, as scalars."""
    is_target = labels != IGNORED  # [batch, length]
    return {
        "loss_sum": cross_entropy_sum(logits, labels),
        "num_targets": is_target.sum(),
        "num_correct": ((logits.argmax(dim=-1) == labels) & is_target).sum(),
    }


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return loss (nats per target), perplexity (may be infinite) and token accuracy; NaN without targets."""
    num_targets = sums["num_targets"]
    if num_targets == 0:
        return dict.fromkeys(("loss", "perplexity", "token_accuracy"), math.nan)
    loss = sums["loss_sum"] / num_targets
    return {"loss": loss, "perplexity": perplexity(loss), "token_accuracy": sums["num_correct"] / num_targets}


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
