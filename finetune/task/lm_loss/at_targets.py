"""A function of a language model's hidden states at target positions, computed inside the model's own forward pass.

For one forward pass, the head is intercepted: it selects the rows of the targets and computes the function while its
weights are gathered, so that no wrapper (DDP, FSDP2, ZeRO-3, peft) is bypassed.
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
"""From the hidden states at the targets, [targets, hidden], and the head to a float32 tensor of any shape."""


def logits_at_targets(model: nn.Module, batch: Batch, *, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """Return the logits at the batch's targets, [targets, vocabulary].

    `inputs` replaces the default inputs of the model, `forward_inputs(model, batch)`.
    """
    head = find_lm_head(model)
    if head is None or not head.is_rowwise:
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
    model: nn.Module, batch: Batch, function: TargetFunction, *, inputs: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the function of the batch's targets, computed in the head's forward, or else from their logits."""
    head = find_lm_head(model)
    if head is None or head.transform is None:
        return function(logits_at_targets(model, batch, inputs=inputs), LmHead.of_logits())
    inputs = forward_inputs(model, batch) if inputs is None else inputs
    request = _Request(_targets(batch), tuple(batch.labels.shape), head, function)
    with head.intercept(request.compute_in_head):
        placeholder: Tensor = model(**inputs).logits
    if request.was_served:
        result: Tensor = _FetchResult.apply(placeholder, request.slot)  # type: ignore[no-untyped-call]  # torch has no types for it
        return result
    return function(_select_targets(placeholder, batch), LmHead.of_logits())


@dataclass
class _ResultSlot:
    """Carries the result around the model's outputs, which may be cast to half precision, and its gradient back."""

    value: Tensor | None = None
    gradient: Tensor | None = None


@dataclass
class _Request:
    """The computation of one forward pass."""

    targets: Targets
    shape: tuple[int, ...]  # of the labels
    head: LmHead | None = None
    function: TargetFunction | None = None
    slot: _ResultSlot = field(default_factory=_ResultSlot)
    was_served: bool = False

    def select(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output at the targets, [1, targets, vocabulary]; at all positions for an unknown shape."""
        rows = self._rows(hidden)
        return forward(hidden) if rows is None else forward(rows[None])

    def compute_in_head(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a placeholder for the logits and keep the result; the head's output for an unknown shape."""
        rows = self._rows(hidden)
        if rows is None:
            return forward(hidden)
        assert self.function is not None and self.head is not None
        result: Tensor = _StoreResult.apply(self.function(rows, self.head), self.slot)  # type: ignore[no-untyped-call]  # likewise
        return result

    def _rows(self, hidden: Tensor) -> Tensor | None:
        num_rows, length = self.shape
        if hidden.dim() == 3 and hidden.shape[0] == num_rows and hidden.shape[1] >= length:
            hidden = _last_positions(hidden, length)  # positions of prompt tuning come first
        elif hidden.dim() != 2 or hidden.shape[0] != num_rows * length:
            return None
        self.was_served = True
        flat, positions = hidden.reshape(-1, hidden.shape[-1]), self.targets.positions
        return flat if len(positions) == len(flat) else flat.index_select(0, positions)


class _StoreResult(torch.autograd.Function):
    """Puts the result into the slot and sends a zero through the model in its place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slot: _ResultSlot) -> Tensor:
        slot.value, ctx.slot = value, slot
        return value.new_zeros(1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None]:
        return ctx.slot.gradient, None


class _FetchResult(torch.autograd.Function):
    """Takes the result out of the slot where the zero comes out of the model."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, slot: _ResultSlot) -> Tensor:
        assert slot.value is not None
        ctx.slot, ctx.placeholder = slot, placeholder.new_zeros(()).expand(placeholder.shape)
        return slot.value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (ctx.slot.gradient,) = upstream
        return ctx.placeholder, None


def _last_positions(positions: Tensor, length: int) -> Tensor:
    """Return the last `length` positions, without slicing if these are all, since its backward copies the gradient."""
    return positions if positions.shape[1] == length else positions[:, positions.shape[1] - length :]


def _targets(batch: Batch) -> Targets:
    assert batch.targets is not None, "a batch of tokens has targets"
    return batch.targets


def _select_targets(logits: Tensor, batch: Batch) -> Tensor:
    """Return the rows of the targets; prompt tuning's positions come before those of the text."""
    text = _last_positions(logits, batch.labels.shape[1])
    return text.flatten(0, -2).index_select(0, _targets(batch).positions)
