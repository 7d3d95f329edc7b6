"""Products with frozen weights in 8-bit floats: two of them, and none for a gradient that nobody needs.

A weight is cast once, with a scale per row. A product casts its other operand, with a scale per token: in the forward
pass the inputs; in the backward pass the output gradient, multiplied by the weight's scales first, so that the same
8-bit values serve both. torchao (0.18) casts the weight in every pass and computes its gradient, too.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from finetune.config.sections.train import TrainSection

DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(DTYPE).max


def casts_frozen_weights(train: TrainSection, *, strategy: str, compiled: str) -> bool:
    """Return whether frozen weights are cast once: where they are whole, never trained, and run as plain code.

    The 8-bit values are kept in addition to the weight, which evaluation, merging and export read.
    """
    return train.precision == "fp8" and strategy in ("single", "ddp") and compiled == "off" and not train.unfreeze


def multiply_in_8_bits(layer: nn.Linear, *, emulate: bool) -> None:
    """Make a layer with a frozen weight multiply in 8 bits while it trains; evaluation keeps the weight's dtype."""
    layer.forward = partial(_forward, layer, _Cast(), emulate)  # type: ignore[method-assign]


class _Cast:
    """The 8-bit values and scales of a weight, computed at its first product and after each change."""

    def __init__(self) -> None:
        self._version: tuple[int, int] | None = None
        self._cast: tuple[Tensor, Tensor] | None = None

    def of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales, [outputs, inputs] and [outputs, 1]."""
        version = (weight.data_ptr(), weight._version)
        if self._cast is None or version != self._version:
            self._cast, self._version = cast_rows(weight.detach()), version
        return self._cast


def _forward(layer: nn.Linear, cast: _Cast, emulate: bool, inputs: Tensor) -> Tensor:
    if not layer.training:
        return functional.linear(inputs, layer.weight, layer.bias)
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = inputs.to(torch.get_autocast_dtype(device_type))
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: Tensor = FrozenProduct.apply(rows, *cast.of(layer.weight), emulate)  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        output = output + layer.bias.to(output.dtype)
    return output if inputs.dim() == 2 else output.view(*inputs.shape[:-1], -1)


class FrozenProduct(torch.autograd.Function):
    """`rows W^T` with W in 8 bits, [rows, outputs] in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scales: Tensor, emulate: bool) -> Tensor:
        """Return the product with the weight, [outputs, inputs], which `scales`, [outputs, 1], multiply."""
        ctx.save_for_backward(weight, scales)
        ctx.emulate = emulate
        return _product(*cast_rows(rows), weight.t(), scales.t(), dtype=rows.dtype, emulate=emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows."""
        weight, scales = ctx.saved_tensors
        operand = weight if ctx.emulate else weight.t().contiguous().t()  # by columns, as the kernel reads it
        ones = scales.new_ones(1, weight.shape[1])
        values = cast_rows(gradient * scales.t())
        return _product(*values, operand, ones, dtype=gradient.dtype, emulate=ctx.emulate), None, None, None


def cast_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in 8 bits, and the scale of each, [rows, 1], by which its values are to be multiplied."""
    scales = (rows.abs().amax(-1, keepdim=True).float() / _MAX).clamp(min=1e-12)
    return (rows / scales).clamp(-_MAX, _MAX).to(DTYPE), scales


def _product(
    one: Tensor, of_rows: Tensor, other: Tensor, of_columns: Tensor, *, dtype: torch.dtype, emulate: bool
) -> Tensor:
    """Return `(one * of_rows) @ (other * of_columns)`, summed in float32."""
    if emulate:
        return ((one.float() * of_rows) @ (other.float() * of_columns)).to(dtype)
    product: Tensor = torch._scaled_mm(
        one, other, scale_a=of_rows, scale_b=of_columns, out_dtype=dtype, use_fast_accum=True
    )
    return product
