"""The loss of a linear head over many tokens, a slab of rows at a time: logits of all rows are never held.

Where the loss is a sum, the gradients of hidden states and weights are worked out in the forward pass, slab by slab, so
that no logits are computed twice (as Liger does: Hsu et al., 2024, arXiv:2410.10989). Where what becomes of each row's
loss is not known yet, slabs are computed again in the backward pass (Wijmans et al., 2024, arXiv:2411.09009).
"""

from typing import Any

import torch
from torch import Tensor

from finetune.task.losses import TokenLoss
from finetune.task.slabs import Ask, Gradients, Slab, slabs


def loss_sums(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ask: Ask) -> Tensor:
    """Return the loss summed over the rows and, not to be learnt from, their summed cross-entropy: [2], float32.

    `rows` are [targets, hidden], `weight` [vocabulary, hidden].
    """
    if len(rows) <= ask.rows or ask.dtype == torch.float16:  # half floats lose gradients that are not scaled up
        losses, plain = losses_of(rows, weight, bias, labels, ask)
        return torch.stack([losses.sum(), plain.sum()])
    loss, plain = _Sum.apply(rows, weight, bias, labels, ask)  # type: ignore[no-untyped-call]  # torch has no types for it
    return torch.stack([loss, plain])


def losses_of(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
    """Return each row's loss and, not to be learnt from, its cross-entropy: both [targets], float32."""
    losses, plain = _Each.apply(rows, weight, bias, labels, ask)  # type: ignore[no-untyped-call]  # likewise
    return losses, plain


@torch.no_grad()
def measured(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ask: Ask) -> Tensor:
    """Return the summed cross-entropy and how many rows have the highest logit at their label: [2], float32."""
    sums = rows.new_zeros(2, dtype=torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        for part, slab in slabs(rows, weight, bias, ask):
            logits = slab.logits()
            highest, likeliest = logits.max(dim=1)
            softmax = slab.softmax(logits)
            _, plain, _ = _losses(logits, softmax, labels[part], TokenLoss(), highest=highest)
            sums += torch.stack([plain.sum(), (likeliest == labels[part]).sum()])
    return sums


class _Sum(torch.autograd.Function):
    """The summed loss; gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ask: Ask
    ) -> tuple[Tensor, Tensor]:
        wanted = Gradients(ctx, rows, weight, bias)
        sums = rows.new_zeros(2, dtype=torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            for part, slab in slabs(rows, weight, bias, ask):
                logits = slab.logits()
                softmax = slab.softmax(logits)
                losses, plain, denominators = _losses(logits, softmax, labels[part], ask.loss)
                sums += torch.stack([losses.sum(), plain.sum()])
                if wanted:
                    wanted.add(_gradient_(softmax, logits, labels[part], denominators, ask), slab, part)
        ctx.save_for_backward(*wanted.made[:3])
        loss, plain_sum = sums.unbind()
        ctx.mark_non_differentiable(plain_sum)
        return loss, plain_sum

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.saved_tensors
        return (*(None if each is None else each.mul_(upstream[0]) for each in made), None, None)


class _Each(torch.autograd.Function):
    """Each row's loss; a single slab's gradient at the logits is kept, several slabs are computed again."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ask: Ask
    ) -> tuple[Tensor, Tensor]:
        needs, kept = any(ctx.needs_input_grad), None
        parts: list[tuple[Tensor, Tensor]] = []
        with torch.autocast(rows.device.type, enabled=False):
            for part, slab in slabs(rows, weight, bias, ask):
                logits = slab.logits()
                softmax = slab.softmax(logits)
                losses, plain, denominators = _losses(logits, softmax, labels[part], ask.loss)
                parts.append((losses, plain))
                if needs and len(rows) <= ask.rows:
                    kept = _gradient_(softmax, logits, labels[part], denominators, ask)
        ctx.ask = ask
        ctx.save_for_backward(rows, weight, bias, labels, kept)
        empty = rows.new_zeros(0, dtype=torch.float32)
        losses, plain = (torch.cat(each) for each in zip(*parts, strict=True)) if parts else (empty, empty.clone())
        ctx.mark_non_differentiable(plain)
        return losses, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, labels, kept = ctx.saved_tensors
        ask: Ask = ctx.ask
        wanted, of_rows = Gradients(ctx, rows, weight, bias), upstream[0][:, None]
        with torch.autocast(rows.device.type, enabled=False):
            if kept is not None:
                wanted.add(kept.mul_(of_rows), Slab.without_room(rows, weight, ask), slice(None))
                return wanted.made
            for part, slab in slabs(rows, weight, bias, ask):
                logits = slab.logits()
                softmax = slab.softmax(logits)
                denominators = _losses(logits, softmax, labels[part], ask.loss)[2]
                gradient = _gradient_(softmax, logits, labels[part], denominators, ask)
                wanted.add(gradient.mul_(of_rows[part]), slab, part)
        return wanted.made


def _losses(
    logits: Tensor, softmax: Tensor, labels: Tensor, loss: TokenLoss, *, highest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's loss, its cross-entropy and the logarithm of its softmax's denominator, [slab] each.

    That is the highest logit less the logarithm of its probability, which is never below 1 / vocabulary.
    """
    top = logits.amax(dim=1) if highest is None else highest
    denominators = top.float() - softmax.amax(dim=1).log()
    plain = denominators - logits.gather(1, labels[:, None]).squeeze(1).float()
    losses = plain
    if loss.label_smoothing:
        evenly = denominators - logits.mean(dim=1, dtype=torch.float32)
        losses = losses + loss.label_smoothing * (evenly - plain)
    if loss.z_loss:
        losses = losses + loss.z_loss * denominators.square()
    return losses, plain, denominators


def _gradient_(softmax: Tensor, logits: Tensor, labels: Tensor, denominators: Tensor, ask: Ask) -> Tensor:
    """Return the gradient of the rows' losses at the head's output; it takes the room of the softmax."""
    loss, chosen = ask.loss, labels[:, None]
    if loss.z_loss:
        softmax.mul_(1 + 2 * loss.z_loss * denominators[:, None])
    softmax.scatter_(1, chosen, softmax.gather(1, chosen) - (1 - loss.label_smoothing))
    if loss.label_smoothing:
        softmax.sub_(loss.label_smoothing / logits.shape[1])
    return ask.finish.pull_(softmax, logits)
