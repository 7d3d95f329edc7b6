"""The loss of a linear head over many tokens, in chunks of rows: the logits of all rows never exist at once.

Where the loss is a sum, the gradients of hidden states and weights are computed in the forward pass, chunk by chunk,
so that no logits are computed twice (as Liger does: Hsu et al., 2024, arXiv:2410.10989). Where the weight of each
row's loss is not known yet, chunks are recomputed in the backward pass (Wijmans et al., 2024, arXiv:2411.09009).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.token_loss import TokenLoss

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512_000_000}
"""Maximum bytes of all that exists at once of one chunk: logits, probabilities, gradients and their copies."""

FLOAT32_LOGIT_BYTES = 8
"""Bytes for each logit: itself, and its probability, which becomes the gradient."""

HALF_LOGIT_BYTES = {"cpu": 10, "cuda": 6}
"""The same in half precision, with 2 bytes for a logit, which its gradient overwrites. A CPU converts in a copy."""

TRANSFORMED_HALF_LOGIT_BYTES = 10
"""The same where the model transforms its logits in float32."""

AUTOGRAD_LOGIT_BYTES, SMOOTHED_LOGIT_BYTES = 18, 30
"""The same where autograd takes the backward pass of the cross-entropy; with smoothing or a z-loss."""

MAX_CHUNK_ROWS = {"cpu": 256, "cuda": 8192}
"""Maximum rows: more are no faster (`benchmarks/experiments/head.md`), and on a CPU they do not fit the cache."""

MIN_CHUNK_ROWS = 64
"""Minimum rows of a chunk, however large the vocabulary: with fewer, reading the weights dominates the time."""


@dataclass(frozen=True)
class LossSpec:
    """What is computed from the rows of a head."""

    loss: TokenLoss
    transform: LogitTransform
    dtype: torch.dtype  # of the matrix products; sums and probabilities are float32
    rows: int  # of a chunk


def rows_per_chunk(vocabulary: int, device: torch.device, *, logit_bytes: int) -> int:
    """Return the number of rows of a chunk in which each logit takes this number of bytes."""
    kind = _kind(device)
    return max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (logit_bytes * vocabulary)))


def bytes_per_logit(dtype: torch.dtype, transform: LogitTransform, device: torch.device) -> int:
    """Return how many bytes of a chunk exist at once for each of its logits, with products in this dtype."""
    if dtype == torch.float32:
        return FLOAT32_LOGIT_BYTES
    return HALF_LOGIT_BYTES[_kind(device)] if transform.is_identity else TRANSFORMED_HALF_LOGIT_BYTES


_ASSUMED_KIND: ContextVar[str | None] = ContextVar("assumed kind of device", default=None)


@contextmanager
def assume_device(kind: str) -> Iterator[None]:
    """Compute chunks meanwhile as large as this kind of device has them, to see what they take there."""
    token = _ASSUMED_KIND.set(kind)
    try:
        yield
    finally:
        _ASSUMED_KIND.reset(token)


def _kind(device: torch.device) -> str:
    kind = _ASSUMED_KIND.get() or device.type
    return kind if kind in CHUNK_BYTES else "cuda"


@dataclass
class Chunk:
    """Some of the rows, and the buffers for their logits, which all chunks share."""

    rows: Tensor  # [chunk, hidden], in the dtype of the products, as the weights
    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    logits_buffer: Tensor | None = None  # [at least chunk, vocabulary], in that dtype
    fp32_buffer: Tensor | None = None  # the same in float32, for probabilities
    transformed_buffer: Tensor | None = None  # the same for logits; None: these are transformed where they are

    @classmethod
    def without_buffers(cls, rows: Tensor, weight: Tensor, spec: LossSpec) -> "Chunk":
        """Return a chunk of all rows whose logits are not computed."""
        return cls(rows.to(spec.dtype), weight.to(spec.dtype), None, spec.transform)

    def logits(self) -> Tensor:
        """Return the logits, [chunk, vocabulary]; in float32 where the model transforms them."""
        assert self.logits_buffer is not None
        output = torch.mm(self.rows, self.weight.t(), out=self.logits_buffer[: len(self.rows)])
        if self.bias is not None:
            output.add_(self.bias)
        if self.transform.is_identity:
            return output
        buffer = self.transformed_buffer
        return self.transform.apply_(output if buffer is None else buffer[: len(output)].copy_(output))

    def softmax(self, logits: Tensor, *, highest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probabilities in float32, and of each row the logarithm of their denominator, [chunk].

        The probabilities are in a buffer that may be overwritten. `highest` is the highest logit of each row.
        """
        assert self.fp32_buffer is not None
        top = (logits.amax(dim=1) if highest is None else highest).float()
        buffer = self.fp32_buffer[: len(logits)]
        if logits.dtype == torch.float32:
            torch.softmax(logits, dim=1, out=buffer)
            return buffer, top - buffer.amax(dim=1).log()  # the highest probability is never below 1 / vocabulary
        torch.sub(logits, top[:, None], out=buffer).exp_()  # torch.softmax would convert bfloat16 in a copy
        denominators = buffer.sum(dim=1)
        return buffer.div_(denominators[:, None]), top + denominators.log()

    def cast(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the dtype of the products, in place of the logits where these have a buffer."""
        if gradient.dtype == self.rows.dtype or self.logits_buffer is None:
            return gradient.to(self.rows.dtype)
        return self.logits_buffer[: len(gradient)].copy_(gradient)


def iterate_chunks(rows: Tensor, weight: Tensor, bias: Tensor | None, spec: LossSpec) -> Iterator[tuple[slice, Chunk]]:
    """Yield the chunks in order, each with its slice of the rows."""
    size, vocabulary = min(spec.rows, len(rows)), len(weight)
    logits_buffer = rows.new_empty(size, vocabulary, dtype=spec.dtype)
    fp32_buffer = rows.new_empty(size, vocabulary, dtype=torch.float32)
    is_in_place = spec.dtype == torch.float32 or spec.transform.is_identity
    buffers = logits_buffer, fp32_buffer, None if is_in_place else torch.empty_like(fp32_buffer)
    cast_weight, cast_bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
    for start in range(0, len(rows), max(1, size)):
        part = slice(start, min(start + size, len(rows)))
        yield part, Chunk(rows[part].to(spec.dtype), cast_weight, cast_bias, spec.transform, *buffers)


class LinearGradients:
    """Accumulates the required gradients over the chunks; None for those that are not required.

    Gradients of the weights are accumulated in float32, even for weights in half precision.
    """

    def __init__(self, ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        self._dtype = weight.dtype
        self._rows = torch.empty_like(rows) if for_rows else None
        self._weight: Tensor | None = None
        self._wanted = weight if for_weight else None
        self._bias = bias.new_zeros(bias.shape, dtype=torch.float32) if for_bias and bias is not None else None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self._rows, self._wanted, self._bias))

    @property
    def values(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and bias, and two None."""
        if self._wanted is not None and self._weight is None:  # no rows
            self._weight = torch.zeros_like(self._wanted)
        weight, bias = (None if each is None else each.to(self._dtype) for each in (self._weight, self._bias))
        return self._rows, weight, bias, None, None

    def add(self, gradient: Tensor, chunk: Chunk, part: slice) -> None:
        """Accumulate the gradients that follow from the chunk's gradient at the head's output, float32.

        The logits are overwritten.
        """
        cast = chunk.cast(gradient)
        if self._rows is not None:
            self._rows[part] = torch.mm(cast, chunk.weight)
        if self._wanted is not None:
            self._add_to_weight(cast, chunk.rows, is_only=self._rows is not None and len(cast) == len(self._rows))
        if self._bias is not None:
            self._bias.add_(gradient.sum(dim=0))

    def _add_to_weight(self, gradient: Tensor, rows: Tensor, *, is_only: bool) -> None:
        is_float32 = gradient.dtype == torch.float32
        if self._weight is None:
            is_half = not (is_float32 or is_only)
            self._weight = _fp32_product(gradient.t(), rows) if is_half else torch.mm(gradient.t(), rows)
        elif is_float32:
            self._weight.addmm_(gradient.t(), rows)
        elif gradient.is_cuda:  # the product itself accumulates half-precision products in float32
            torch.addmm(self._weight, gradient.t(), rows, out_dtype=torch.float32, out=self._weight)
        else:
            self._weight.add_(torch.mm(gradient.t(), rows))


def _fp32_product(one: Tensor, other: Tensor) -> Tensor:
    return torch.mm(one, other, out_dtype=torch.float32) if one.is_cuda else torch.mm(one, other).float()


def loss_sums(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return the loss summed over the rows and, without gradient, their summed cross-entropy: [2], float32.

    `rows` are [targets, hidden], `weight` [vocabulary, hidden].
    """
    if len(rows) <= spec.rows or spec.dtype == torch.float16:  # fp16 gradients that are not scaled underflow
        losses, plain = row_losses(rows, weight, bias, labels, spec)
        return torch.stack([losses.sum(), plain.sum()])
    loss, plain = _SummedLoss.apply(rows, weight, bias, labels, spec)  # type: ignore[no-untyped-call]  # torch has no types for it
    return torch.stack([loss, plain])


def row_losses(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and, without gradient, its cross-entropy: both [targets], float32."""
    losses, plain = _RowLosses.apply(rows, weight, bias, labels, spec)  # type: ignore[no-untyped-call]  # likewise
    return losses, plain


@torch.no_grad()
def loss_and_num_correct(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return the summed cross-entropy and how many rows have the highest logit at their label: [2], float32."""
    sums = rows.new_zeros(2, dtype=torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        for part, chunk in iterate_chunks(rows, weight, bias, spec):
            logits = chunk.logits()
            highest, likeliest = logits.max(dim=1)
            _, denominators = chunk.softmax(logits, highest=highest)
            _, plain = _losses(logits, denominators, labels[part], TokenLoss())
            sums += torch.stack([plain.sum(), (likeliest == labels[part]).sum()])
    return sums


class _SummedLoss(torch.autograd.Function):
    """The summed loss; gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
    ) -> tuple[Tensor, Tensor]:
        gradients = LinearGradients(ctx, rows, weight, bias)
        loss, plain = _add_chunks(gradients, (rows, weight, bias), labels=labels, spec=spec).unbind()
        ctx.save_for_backward(*gradients.values[:3])  # the chunks' buffers are free by now
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        values = ctx.saved_tensors
        return (*(None if each is None else each.mul_(upstream[0]) for each in values), None, None)


def _add_chunks(
    gradients: LinearGradients, inputs: tuple[Tensor, Tensor, Tensor | None], *, labels: Tensor, spec: LossSpec
) -> Tensor:
    """Return loss and cross-entropy, summed over the rows: [2]; accumulates the gradients that are required."""
    sums = inputs[0].new_zeros(2, dtype=torch.float32)
    with torch.autocast(sums.device.type, enabled=False):
        for part, chunk in iterate_chunks(*inputs, spec):
            logits = chunk.logits()
            softmax, denominators = chunk.softmax(logits)
            losses, plain = _losses(logits, denominators, labels[part], spec.loss)
            sums += torch.stack([losses.sum(), plain.sum()])
            if gradients:
                gradients.add(_gradient_(softmax, logits, labels[part], denominators, spec), chunk, part)
    return sums


class _RowLosses(torch.autograd.Function):
    """The loss of each row; a single chunk keeps its gradient at the logits, several chunks are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
    ) -> tuple[Tensor, Tensor]:
        needs, kept = any(ctx.needs_input_grad), None
        parts: list[tuple[Tensor, Tensor]] = []
        with torch.autocast(rows.device.type, enabled=False):
            for part, chunk in iterate_chunks(rows, weight, bias, spec):
                logits = chunk.logits()
                softmax, denominators = chunk.softmax(logits)
                losses, plain = _losses(logits, denominators, labels[part], spec.loss)
                parts.append((losses, plain))
                if needs and len(rows) <= spec.rows:
                    kept = _gradient_(softmax, logits, labels[part], denominators, spec)
        ctx.spec = spec
        ctx.save_for_backward(rows, weight, bias, labels, kept)
        empty = rows.new_zeros(0, dtype=torch.float32)
        losses, plain = (torch.cat(each) for each in zip(*parts, strict=True)) if parts else (empty, empty.clone())
        ctx.mark_non_differentiable(plain)
        return losses, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, labels, kept = ctx.saved_tensors
        spec: LossSpec = ctx.spec
        gradients, of_rows = LinearGradients(ctx, rows, weight, bias), upstream[0][:, None]
        with torch.autocast(rows.device.type, enabled=False):
            if kept is not None:
                gradients.add(kept.mul_(of_rows), Chunk.without_buffers(rows, weight, spec), slice(None))
                return gradients.values
            for part, chunk in iterate_chunks(rows, weight, bias, spec):
                logits = chunk.logits()
                softmax, denominators = chunk.softmax(logits)
                gradient = _gradient_(softmax, logits, labels[part], denominators, spec)
                gradients.add(gradient.mul_(of_rows[part]), chunk, part)
        return gradients.values


def _losses(logits: Tensor, denominators: Tensor, labels: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
    """Return each row's loss and its cross-entropy, [chunk] each; `denominators` are logarithms."""
    plain = denominators - logits.gather(1, labels[:, None]).squeeze(1).float()
    losses = plain
    if loss.label_smoothing:
        evenly = denominators - logits.mean(dim=1, dtype=torch.float32)
        losses = losses + loss.label_smoothing * (evenly - plain)
    if loss.z_loss:
        losses = losses + loss.z_loss * denominators.square()
    return losses, plain


def _gradient_(softmax: Tensor, logits: Tensor, labels: Tensor, denominators: Tensor, spec: LossSpec) -> Tensor:
    """Return the gradient of the rows' losses at the head's output; it overwrites the softmax, and may the logits."""
    loss, chosen = spec.loss, labels[:, None]
    if loss.z_loss:
        softmax.mul_(1 + 2 * loss.z_loss * denominators[:, None])
    softmax.scatter_(1, chosen, softmax.gather(1, chosen) - (1 - loss.label_smoothing))
    if loss.label_smoothing:
        softmax.sub_(loss.label_smoothing / logits.shape[1])
    return spec.transform.backward_(softmax, logits)
