"""A function of a language model's hidden states at target positions, computed inside the model's own forward pass.

For one forward pass the head is intercepted: it selects the rows of the targets and computes the function there,
where its weights are whole, so that no wrapper (DDP, FSDP2, ZeRO-3, peft) is bypassed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch, Targets
from finetune.task.lm_loss.head import LmHead, find_lm_head
from finetune.task.model_inputs import forward_inputs

TargetFunction = Callable[[Tensor, LmHead], Tensor]
"""From the targets' hidden states, [targets, hidden], to whatever is asked: a float32 tensor of any shape."""


def logits_at_targets(model: nn.Module, batch: Batch, *, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the logits at the batch's targets, [targets, vocabulary].

    `inputs` are what the model is given where that is not `forward_inputs(model, batch)`.
    """
    head = find_lm_head(model)
    if head is None or not head.keeps_rows:
        return _select_targets(logits_everywhere(model, batch, inputs=inputs), batch)
    inputs = forward_inputs(model, batch) if inputs is None else inputs
    request = _Request(_targets(batch), tuple(batch.labels.shape))
    with head.intercept(request.select):
        logits: Tensor = model(**inputs).logits
    return logits[0] if request.was_served else _select_targets(logits, batch)


def logits_everywhere(model: nn.Module, batch: Batch, *, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the logits of all labels, [batch, length, vocabulary]; prompt tuning's positions come before the text."""
    logits: Tensor = model(**(forward_inputs(model, batch) if inputs is None else inputs)).logits
    return _last_positions(logits, batch.labels.shape[1])


def compute_at_targets(
    model: nn.Module, batch: Batch, answer: TargetFunction, *, inputs: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the answer about the batch's targets, given where the head is, else about their logits."""
    head = find_lm_head(model)
    if head is None or head.finish is None:
        return answer(logits_at_targets(model, batch, inputs=inputs), LmHead.of_logits())
    inputs = forward_inputs(model, batch) if inputs is None else inputs
    request = _Request(_targets(batch), tuple(batch.labels.shape), head, answer)
    with head.intercept(request.compute_in_head):
        told: Tensor = model(**inputs).logits
    if request.was_served:
        arrived: Tensor = _FetchResult.apply(told, request.parcel)  # type: ignore[no-untyped-call]  # torch has no types for it
        return arrived
    return answer(_select_targets(told, batch), LmHead.of_logits())


@dataclass
class _ResultSlot:
    """What goes round the model's outputs, which may be cut to half floats on their way, and comes back to the head."""

    value: Tensor | None = None
    gradient: Tensor | None = None


@dataclass
class _Request:
    """What one forward pass is asked."""

    targets: Targets
    shape: tuple[int, ...]  # of the labels
    head: LmHead | None = None
    answer: TargetFunction | None = None
    parcel: _ResultSlot = field(default_factory=_ResultSlot)
    was_served: bool = False

    def select(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output at the targets, [1, targets, vocabulary]; everywhere where they cannot be found."""
        rows = self._rows(hidden)
        return forward(hidden) if rows is None else forward(rows[None])

    def compute_in_head(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what stands for the answer, a zero as logits; the head's output where targets cannot be found."""
        rows = self._rows(hidden)
        if rows is None:
            return forward(hidden)
        assert self.answer is not None and self.head is not None
        left: Tensor = _StoreResult.apply(self.answer(rows, self.head), self.parcel)  # type: ignore[no-untyped-call]  # likewise
        return left

    def _rows(self, hidden: Tensor) -> Tensor | None:
        num_rows, length = self.shape
        if hidden.dim() == 3 and hidden.shape[0] == num_rows and hidden.shape[1] >= length:
            hidden = _last_positions(hidden, length)  # what is learnt before the text comes first
        elif hidden.dim() != 2 or hidden.shape[0] != num_rows * length:
            return None
        self.was_served = True
        flat, positions = hidden.reshape(-1, hidden.shape[-1]), self.targets.positions
        return flat if len(positions) == len(flat) else flat.index_select(0, positions)


class _StoreResult(torch.autograd.Function):
    """Lays the answer into the parcel and lets a zero go through the model in its place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parcel: _ResultSlot) -> Tensor:
        parcel.value, ctx.parcel = value, parcel
        return value.new_zeros(1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None]:
        return ctx.parcel.gradient, None


class _FetchResult(torch.autograd.Function):
    """Takes the answer out of the parcel where the zero comes out of the model."""

    @staticmethod
    def forward(ctx: Any, told: Tensor, parcel: _ResultSlot) -> Tensor:
        assert parcel.value is not None
        ctx.parcel, ctx.told = parcel, told.new_zeros(()).expand(told.shape)
        return parcel.value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (ctx.parcel.gradient,) = upstream
        return ctx.told, None


def _last_positions(positions: Tensor, length: int) -> Tensor:
    """Return the last so many; all as they are, for a slice has a gradient to copy."""
    return positions if positions.shape[1] == length else positions[:, positions.shape[1] - length :]


def _targets(batch: Batch) -> Targets:
    assert batch.targets is not None, "a batch of tokens knows its targets"
    return batch.targets


def _select_targets(logits: Tensor, batch: Batch) -> Tensor:
    """Return the rows of the targets; prompt tuning's positions come before those of the text."""
    text = _last_positions(logits, batch.labels.shape[1])
    return text.flatten(0, -2).index_select(0, _targets(batch).positions)
