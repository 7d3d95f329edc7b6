"""The loss of a linear head over many tokens, in chunks of rows, so that the full logits are never materialized.

For a summed loss, the gradients of hidden states and weights are computed in the forward pass, chunk by chunk, so that
no logits are computed twice (as in Liger: Hsu et al., 2024, arXiv:2410.10989). For per-row losses, whose weights are
not known yet, chunks are recomputed in the backward pass (Wijmans et al., 2024, arXiv:2411.09009).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.runtime.optional import lazily
from finetune.runtime.parallel import VocabularyPart
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.token_loss import TokenLoss

with lazily():
    from liger_kernel.ops import cross_entropy as liger

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512_000_000}
"""Maximum bytes of a chunk's simultaneous tensors: logits, probabilities, gradients and their copies."""

FLOAT32_LOGIT_BYTES = 8
"""Bytes per logit: the logit and its probability, which is overwritten by the gradient."""

HALF_LOGIT_BYTES = {"cpu": 10, "cuda": 6}
"""Bytes per logit in half precision: 2 for the logit, which its gradient overwrites. CPUs convert into a copy."""

TRANSFORMED_HALF_LOGIT_BYTES = 10
"""Bytes per half-precision logit if the model transforms its logits in float32."""

AUTOGRAD_LOGIT_BYTES, SMOOTHED_LOGIT_BYTES = 18, 30
"""Bytes per logit if autograd differentiates the cross-entropy; without and with label smoothing or z-loss."""

MAX_CHUNK_ROWS = {"cpu": 256, "cuda": 8192}
"""Maximum rows per chunk: more are no faster (`benchmarks/experiments/head.py`) and do not fit a CPU's cache."""

MIN_CHUNK_ROWS = 64
"""Minimum rows per chunk for any vocabulary size: with fewer, reading the weights dominates the time."""

TILE_ROWS = 128
"""On a GPU a chunk has a multiple of these rows, which matrix products compute as a block: 640 of 665."""


@dataclass(frozen=True)
class LossSpec:
    """The settings of the chunked loss."""

    loss: TokenLoss
    transform: LogitTransform
    dtype: torch.dtype  # of the matrix products; sums and probabilities are float32
    rows: int  # per chunk
    part: VocabularyPart | None = None  # of the weights; None: they cover the whole vocabulary
    is_fused: bool = False  # a summed loss runs liger's kernel on the logits


def rows_per_chunk(vocabulary: int, device: torch.device, *, logit_bytes: int) -> int:
    """Return the number of rows of a chunk if a logit takes `logit_bytes`."""
    device_type = _device_type(device)
    max_rows = CHUNK_BYTES[device_type] // (logit_bytes * vocabulary)
    rows = max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS[device_type], max_rows))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS and device_type == "cuda" else rows


def bytes_per_logit(dtype: torch.dtype, transform: LogitTransform, device: torch.device) -> int:
    """Return the peak bytes per logit of a chunk, with matrix products in this dtype."""
    if dtype == torch.float32:
        return FLOAT32_LOGIT_BYTES
    return HALF_LOGIT_BYTES[_device_type(device)] if transform.is_identity else TRANSFORMED_HALF_LOGIT_BYTES


_KERNEL_SETTINGS: dict[str, Any] = {
    "weight_ptr": None,
    "z_loss_ptr": None,
    "loss_stride": 1,
    "token_accuracy_ptr": None,
    "token_accuracy_stride": 0,
    "predicted_tokens_ptr": None,
    "predicted_tokens_stride": 0,
    "n_non_ignore": 1,  # read by means
    "sum_non_ignore_weight": 1,
    "weight_sum": 0.0,
    "ignore_index": -100,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "reduction": "sum",
    "softcap": None,
    "RETURN_Z_LOSS": False,
    "RETURN_TOKEN_ACCURACY": False,
    "RETURN_PREDICTED_TOKENS": False,
    "HAS_WEIGHT": False,
    "HAS_SOFTCAPPING": False,
}
"""Arguments of liger's kernel (0.8.5) that are always the same. Its own function synchronizes with the device."""

_KERNEL_INPUTS = {"X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "n_cols", "BLOCK_SIZE", "HAS_GRADIENTS"}

_fused_device: str | None = None


def fuse_chunks(device_type: str | None) -> bool:
    """Run liger's kernel on chunks on such devices, on none for None; return whether the installed version has it.

    It reads the logits twice and overwrites them by their gradient, 6 bytes per logit in half precision; our own
    operations read and write 34.
    """
    global _fused_device
    _fused_device = device_type
    if device_type and {*_KERNEL_SETTINGS, *_KERNEL_INPUTS} != set(liger.liger_cross_entropy_kernel.arg_names):
        _fused_device = None
    return _fused_device is not None


def runs_fused(device: torch.device, loss: TokenLoss, transform: LogitTransform) -> bool:
    """Return whether liger's kernel computes this loss."""
    return device.type == _fused_device and loss.is_plain and transform.is_identity


def _losses_and_gradient_(logits: Tensor, labels: Tensor, *, needs_gradient: bool) -> Tensor:
    """Return the cross-entropy of each row, [chunk], float32; overwrites the logits by their gradient."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    vocabulary = logits.shape[1]
    liger.liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=labels,
        Y_stride=labels.stride(0),
        loss_ptr=losses,
        n_cols=vocabulary,
        BLOCK_SIZE=min(liger.MAX_FUSED_SIZE, 1 << (vocabulary - 1).bit_length()),
        HAS_GRADIENTS=needs_gradient,
        num_warps=32,
        **_KERNEL_SETTINGS,
    )
    return losses


_ASSUMED_DEVICE: ContextVar[str | None] = ContextVar("assumed device type", default=None)


@contextmanager
def assume_device(device_type: str) -> Iterator[None]:
    """Use the chunk size of this device type in this context, to predict its memory."""
    token = _ASSUMED_DEVICE.set(device_type)
    try:
        yield
    finally:
        _ASSUMED_DEVICE.reset(token)


def _device_type(device: torch.device) -> str:
    device_type = _ASSUMED_DEVICE.get() or device.type
    return device_type if device_type in CHUNK_BYTES else "cuda"


@dataclass
class LogitsChunk:
    """A chunk of rows, and the buffers for its logits, which all chunks share."""

    rows: Tensor  # [chunk, hidden], in the dtype of the products, like the weights
    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    logits_buffer: Tensor | None = None  # [at least chunk, vocabulary], in the dtype of the products
    fp32_buffer: Tensor | None = None  # the same shape in float32, for probabilities
    transformed_buffer: Tensor | None = None  # the same in float32, for logits; None: transform them in place
    part: VocabularyPart | None = None  # of the weights

    @classmethod
    def without_buffers(cls, rows: Tensor, weight: Tensor, spec: LossSpec) -> "LogitsChunk":
        """Return a chunk of all rows for which no logits are computed."""
        return cls(rows.to(spec.dtype), weight.to(spec.dtype), None, spec.transform)

    def logits(self) -> Tensor:
        """Return the logits, [chunk, vocabulary]; in float32 if the model transforms them."""
        assert self.logits_buffer is not None
        output = torch.mm(self.rows, self.weight.t(), out=self.logits_buffer[: len(self.rows)])
        if self.bias is not None:
            output.add_(self.bias)
        if self.transform.is_identity:
            return output
        buffer = self.transformed_buffer
        return self.transform.apply_(output if buffer is None else buffer[: len(output)].copy_(output))

    def softmax(self, logits: Tensor, *, highest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probabilities in float32 and each row's log-sum-exp, [chunk]; ranks may have parts of them.

        The probabilities are in a buffer that may be overwritten. `highest` is the highest logit of each row.
        """
        assert self.fp32_buffer is not None
        top = (logits.amax(dim=1) if highest is None else highest).float()
        buffer = self.fp32_buffer[: len(logits)]
        if logits.dtype == torch.float32:
            torch.softmax(logits, dim=1, out=buffer)
            own = top - buffer.amax(dim=1).log()  # the highest probability is never below 1 / vocabulary
        else:
            torch.sub(logits, top[:, None], out=buffer).exp_()  # torch.softmax would convert bfloat16 in a copy
            sums = buffer.sum(dim=1)
            buffer.div_(sums[:, None])
            own = top + sums.log()
        if self.part is None:
            return buffer, own
        denominators = self.part.log_sum_exp(own)
        return buffer.mul_((own - denominators).exp_()[:, None]), denominators

    def cast(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the dtype of the products, in the logits' buffer if there is one."""
        if gradient.dtype == self.rows.dtype or self.logits_buffer is None:
            return gradient.to(self.rows.dtype)
        return self.logits_buffer[: len(gradient)].copy_(gradient)


def iterate_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, spec: LossSpec
) -> Iterator[tuple[slice, LogitsChunk]]:
    """Yield every chunk in order, with its slice of the rows."""
    size, vocabulary = min(spec.rows, len(rows)), len(weight)
    logits_buffer = rows.new_empty(size, vocabulary, dtype=spec.dtype)
    fp32_buffer = rows.new_empty(0 if spec.is_fused else size, vocabulary, dtype=torch.float32)
    is_in_place = spec.dtype == torch.float32 or spec.transform.is_identity
    buffers = logits_buffer, fp32_buffer, None if is_in_place else torch.empty_like(fp32_buffer)
    cast_weight, cast_bias = weight.to(spec.dtype), None if bias is None else bias.to(spec.dtype)
    for start in range(0, len(rows), max(1, size)):
        part = slice(start, min(start + size, len(rows)))
        yield part, LogitsChunk(rows[part].to(spec.dtype), cast_weight, cast_bias, spec.transform, *buffers, spec.part)


class LinearGradients:
    """Accumulates the required gradients over the chunks; gradients that are not required are None.

    Weight gradients are accumulated in float32, even for half-precision weights.
    """

    def __init__(self, ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        self._dtype = weight.dtype
        self._rows = torch.empty_like(rows) if for_rows else None
        self._weight: Tensor | None = None
        self._trained_weight = weight if for_weight else None
        self._bias = bias.new_zeros(bias.shape, dtype=torch.float32) if for_bias and bias is not None else None

    def __bool__(self) -> bool:
        return any(tensor is not None for tensor in (self._rows, self._trained_weight, self._bias))

    @property
    def values(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and bias, and None twice (for labels and spec)."""
        if self._trained_weight is not None and self._weight is None:  # no rows
            self._weight = torch.zeros_like(self._trained_weight)
        weight = None if self._weight is None else self._weight.to(self._dtype)
        bias = None if self._bias is None else self._bias.to(self._dtype)
        return self._rows, weight, bias, None, None

    def add(self, gradient: Tensor, chunk: LogitsChunk, part: slice) -> None:
        """Accumulate a chunk's gradients from the float32 gradient at the head's output; overwrites the logits."""
        cast = chunk.cast(gradient)
        if self._rows is not None:
            self._rows[part] = torch.mm(cast, chunk.weight)
        if self._trained_weight is not None:
            is_float32 = cast.dtype == torch.float32
            if self._weight is None:
                if is_float32 or (self._rows is not None and len(cast) == len(self._rows)):
                    self._weight = torch.mm(cast.t(), chunk.rows)
                elif cast.is_cuda:
                    self._weight = torch.mm(cast.t(), chunk.rows, out_dtype=torch.float32)
                else:
                    self._weight = torch.mm(cast.t(), chunk.rows).float()
            elif is_float32:
                self._weight.addmm_(cast.t(), chunk.rows)
            elif cast.is_cuda:  # the matrix product accumulates in float32
                torch.addmm(self._weight, cast.t(), chunk.rows, out_dtype=torch.float32, out=self._weight)
            else:
                self._weight.add_(torch.mm(cast.t(), chunk.rows))
        if self._bias is not None:
            self._bias.add_(gradient.sum(dim=0, dtype=torch.float32))


def loss_sums(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return the loss and the cross-entropy (without gradient), summed over the rows: [2], float32.

    `rows` are [targets, hidden], `weight` [vocabulary, hidden].
    """
    is_single = len(rows) <= spec.rows and not spec.is_fused
    if is_single or spec.dtype == torch.float16:  # unscaled fp16 gradients underflow
        losses, plain = row_losses(rows, weight, bias, labels, spec)
        return torch.stack([losses.sum(), plain.sum()])
    loss, plain = _SummedLoss.apply(rows, weight, bias, labels, spec)  # type: ignore[no-untyped-call]  # torch has no types for it
    return torch.stack([loss, plain])


def row_losses(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """Return the loss and the cross-entropy (without gradient) of each row: both [targets], float32."""
    losses, plain = _RowLosses.apply(rows, weight, bias, labels, spec)  # type: ignore[no-untyped-call]  # as above
    return losses, plain


@torch.no_grad()
def loss_and_num_correct(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return the summed cross-entropy and the number of rows whose label has the highest logit: [2], float32."""
    sums = rows.new_zeros(2, dtype=torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        for part, chunk in iterate_chunks(rows, weight, bias, spec):
            logits = chunk.logits()
            highest, likeliest = logits.max(dim=1)
            _, denominators = chunk.softmax(logits, highest=highest)
            _, plain = _losses(logits, denominators, labels[part], spec)
            if spec.part is not None:  # the first token of all parts with the highest logit
                of_all = spec.part.reduce_(highest.clone(), dist.ReduceOp.MAX)
                likeliest = (likeliest + spec.part.first).where(highest == of_all, spec.part.total)
                likeliest = spec.part.reduce_(likeliest, dist.ReduceOp.MIN)
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
        return (*(None if gradient is None else gradient.mul_(upstream[0]) for gradient in values), None, None)


def _add_chunks(
    gradients: LinearGradients, inputs: tuple[Tensor, Tensor, Tensor | None], *, labels: Tensor, spec: LossSpec
) -> Tensor:
    """Return loss and cross-entropy, summed over the rows: [2]; accumulates the required gradients."""
    sums = inputs[0].new_zeros(2, dtype=torch.float32)
    with torch.autocast(sums.device.type, enabled=False):
        for part, chunk in iterate_chunks(*inputs, spec):
            logits = chunk.logits()
            if spec.is_fused:
                sums += _losses_and_gradient_(logits, labels[part], needs_gradient=bool(gradients)).sum()
                if gradients:
                    gradients.add(logits, chunk, part)
                continue
            softmax, denominators = chunk.softmax(logits)
            losses, plain = _losses(logits, denominators, labels[part], spec)
            sums += torch.stack([losses.sum(), plain.sum()])
            if gradients:
                gradients.add(_gradient_(softmax, logits, labels[part], denominators, spec), chunk, part)
    return sums


class _RowLosses(torch.autograd.Function):
    """The loss of each row; a single chunk saves its gradient at the logits, several chunks are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
    ) -> tuple[Tensor, Tensor]:
        needs_gradient, saved = any(ctx.needs_input_grad), None
        parts: list[tuple[Tensor, Tensor]] = []
        with torch.autocast(rows.device.type, enabled=False):
            for part, chunk in iterate_chunks(rows, weight, bias, spec):
                logits = chunk.logits()
                softmax, denominators = chunk.softmax(logits)
                losses, plain = _losses(logits, denominators, labels[part], spec)
                parts.append((losses, plain))
                if needs_gradient and len(rows) <= spec.rows:
                    saved = _gradient_(softmax, logits, labels[part], denominators, spec)
        ctx.spec = spec
        ctx.save_for_backward(rows, weight, bias, labels, saved)
        empty = rows.new_zeros(0, dtype=torch.float32)
        losses, plain = (torch.cat(chunks) for chunks in zip(*parts, strict=True)) if parts else (empty, empty.clone())
        ctx.mark_non_differentiable(plain)
        return losses, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, labels, saved = ctx.saved_tensors
        spec: LossSpec = ctx.spec
        gradients, of_rows = LinearGradients(ctx, rows, weight, bias), upstream[0][:, None]
        with torch.autocast(rows.device.type, enabled=False):
            if saved is not None:
                gradients.add(saved.mul_(of_rows), LogitsChunk.without_buffers(rows, weight, spec), slice(None))
                return gradients.values
            for part, chunk in iterate_chunks(rows, weight, bias, spec):
                logits = chunk.logits()
                softmax, denominators = chunk.softmax(logits)
                gradient = _gradient_(softmax, logits, labels[part], denominators, spec)
                gradients.add(gradient.mul_(of_rows[part]), chunk, part)
        return gradients.values


def _losses(logits: Tensor, denominators: Tensor, labels: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Return the loss and the cross-entropy of each row, [chunk] each; `denominators` are the rows' log-sum-exps."""
    loss, part = spec.loss, spec.part
    if part is None:
        at_labels = logits.gather(1, labels[:, None]).squeeze(1).float()
    else:
        columns, is_own = part.locate(labels)
        at_labels = part.reduce_(logits.gather(1, columns[:, None]).squeeze(1).float().where(is_own, 0.0))
    losses = plain = denominators - at_labels
    if loss.label_smoothing:
        mean = logits.mean(dim=1, dtype=torch.float32)
        uniform = denominators - (mean if part is None else part.reduce_(mean * (part.size / part.total)))
        losses = losses + loss.label_smoothing * (uniform - plain)
    if loss.z_loss:
        losses = losses + loss.z_loss * denominators.square()
    return losses, plain


def _gradient_(softmax: Tensor, logits: Tensor, labels: Tensor, denominators: Tensor, spec: LossSpec) -> Tensor:
    """Return the gradient of the rows' losses at the head's output; overwrites the softmax, and possibly the logits."""
    loss, part = spec.loss, spec.part
    columns: Tensor = labels
    subtracted: Any = 1 - loss.label_smoothing
    if part is not None:
        columns, is_own = part.locate(labels)
        subtracted = subtracted * is_own[:, None]
    if loss.z_loss:
        softmax.mul_(1 + 2 * loss.z_loss * denominators[:, None])
    chosen = columns[:, None]
    softmax.scatter_(1, chosen, softmax.gather(1, chosen) - subtracted)
    if loss.label_smoothing:
        softmax.sub_(loss.label_smoothing / (logits.shape[1] if part is None else part.total))
    return spec.transform.backward_(softmax, logits)
