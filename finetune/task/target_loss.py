"""The loss of predicted tokens, taken at target positions alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.sections.train import LossKernel
from finetune.data.batch import Batch
from finetune.task import linear_loss
from finetune.task.at_targets import asked_at_targets, logits_everywhere
from finetune.task.heads import Head, head_of, in_parts
from finetune.task.kernels import kernel_for
from finetune.task.losses import TokenLoss
from finetune.task.metrics import token_sums
from finetune.task.slabs import Ask, rows_per_slab

FEW_LOGITS = 1 << 18
"""Elements of all logits up to which `auto` has all of them made: asking at targets takes half a millisecond more."""


@dataclass(frozen=True)
class TargetLoss:
    """The loss of a batch's targets by a model, in as little memory as the kernel needs."""

    loss: TokenLoss
    kernel: LossKernel = "auto"

    def sums(self, model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return `loss_sum` and, unless it is that, the detached sum of the plain `cross_entropy`."""
        labels = _labels(batch)
        if self._takes_all(model, batch):
            return self.loss.sums(logits_everywhere(model, batch, inputs=inputs), batch.labels)
        both = asked_at_targets(
            model, batch, partial(_trained, labels=labels, loss=self.loss, kernel=self.kernel), inputs=inputs
        )
        loss_sum, plain = both.unbind()
        return {"loss_sum": loss_sum} if self.loss.is_plain else {"loss_sum": loss_sum, "cross_entropy": plain.detach()}

    def measured(self, model: nn.Module, batch: Batch, inputs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the summed cross-entropy, the number of targets and how many of them have the highest logit."""
        labels = _labels(batch)
        if self._takes_all(model, batch):
            return token_sums(logits_everywhere(model, batch, inputs=inputs), batch.labels)
        both = asked_at_targets(model, batch, partial(_measured, labels=labels), inputs=inputs)
        loss_sum, num_correct = both.unbind()
        num_targets = torch.full((), len(labels), device=loss_sum.device)
        return {"loss_sum": loss_sum, "num_targets": num_targets, "num_correct": num_correct}

    def _takes_all(self, model: nn.Module, batch: Batch) -> bool:
        """Tell whether the logits of all labels are made; `auto` does where that costs less than asking at some."""
        if self.kernel != "auto":
            return self.kernel == "plain"
        head = head_of(model)
        return head is not None and batch.labels.numel() * head.vocabulary <= FEW_LOGITS


def log_probabilities_at_targets(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability in nats of each of the batch's targets, [targets], in float32."""
    return -asked_at_targets(model, batch, partial(_each, labels=_labels(batch)))


def _labels(batch: Batch) -> Tensor:
    assert batch.targets is not None, "a batch of tokens knows its targets"
    return batch.targets.labels


def _trained(rows: Tensor, head: Head, *, labels: Tensor, loss: TokenLoss, kernel: LossKernel) -> Tensor:
    """Return the loss and the cross-entropy, summed: [2]."""
    linear = head.linear_for(rows)
    if linear is not None:
        ask, theirs = _ask(rows, head, linear[0], loss), kernel_for(kernel, rows, linear[1])
        if theirs is None:
            return linear_loss.loss_sums(rows, *linear, labels, ask)
        weight, bias = (None if each is None else each.to(ask.dtype) for each in linear)
        assert weight is not None
        return theirs(rows.to(ask.dtype), weight, bias, labels, ask.finish).expand(2)
    return torch.stack(in_parts(partial(_sums, loss, head), head, rows, labels)).sum(dim=0)


def _each(rows: Tensor, head: Head, *, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each target, [targets]."""
    linear = head.linear_for(rows)
    if linear is not None:
        return linear_loss.losses_of(rows, *linear, labels, _ask(rows, head, linear[0], TokenLoss()))[0]
    return torch.cat(in_parts(partial(_losses, head), head, rows, labels))


def _measured(rows: Tensor, head: Head, *, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy and how many targets have the highest logit: [2]."""
    linear = head.linear_for(rows)
    if linear is not None:
        return linear_loss.measured(rows, *linear, labels, _ask(rows, head, linear[0], TokenLoss()))
    return torch.stack(in_parts(partial(_counted, head), head, rows, labels)).sum(dim=0)


def _sums(loss: TokenLoss, head: Head, rows: Tensor, labels: Tensor) -> Tensor:
    sums = loss.sums(head.logits(rows), labels)
    return torch.stack([sums["loss_sum"], sums.get("cross_entropy", sums["loss_sum"])])


def _losses(head: Head, rows: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head.logits(rows), labels, reduction="none")


def _counted(head: Head, rows: Tensor, labels: Tensor) -> Tensor:
    logits = head.logits(rows)
    loss_sum = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([loss_sum, (logits.argmax(dim=-1) == labels).sum()])


def _ask(rows: Tensor, head: Head, weight: Tensor, loss: TokenLoss) -> Ask:
    assert head.finish is not None
    return Ask(loss, head.finish, head.dtype_of(rows), rows_per_slab(len(weight), rows.device))
