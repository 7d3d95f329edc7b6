"""The update of `LowBitAdamW` on a GPU as one Triton kernel per parameter, which reads and writes every value once.

Imported only if triton is installed. The arithmetic is that of `low_bit`, in the same order and with the same random
bits. It uses IEEE square roots and divisions and no fused multiply-adds, so results equal the CPU's except where the
CPU's vectorized loops use fused multiply-adds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from finetune.runtime.optional import require

triton: Any = require("triton", extra="", purpose="train.optimizer.state_dtype on a GPU")
tl: Any = require("triton.language", extra="", purpose="train.optimizer.state_dtype on a GPU")

_NUM_ELEMENTS = 2048
"""Per program: enough for each of its threads to load 16 bytes of codes."""


@dataclass(frozen=True)
class KernelUpdate:
    """The scalar inputs of an update: AdamW's hyperparameters, and the keys of the random bits as int32."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    moments_key: int
    weights_key: int
    rounds_weights: bool


def launch_update(
    weights: Tensor,
    gradient: Tensor,
    *,
    state: Mapping[str, Tensor],
    start: int,
    skip: Tensor,
    update: KernelUpdate,
) -> None:
    """Update contiguous weights and their state in place, unless `skip` is 1 on the device.

    `state` has `exp_avg`, `exp_avg_sq`, `step`, and the scales of 8-bit moments; `start` is the index of the first
    element within the full parameter.
    """
    scales = state.get("exp_avg_scale"), state.get("exp_avg_sq_scale")
    is_quantized = scales[0] is not None
    width = weights.numel() // scales[0].numel() if scales[0] is not None else _NUM_ELEMENTS
    padded_width = triton.next_power_of_2(width)
    per_program = max(1, _NUM_ELEMENTS // padded_width)
    beta1, beta2 = update.betas
    _update[(triton.cdiv(triton.cdiv(weights.numel(), width), per_program),)](
        weights,
        gradient,
        state["exp_avg"],
        state["exp_avg_sq"],
        scales[0] if is_quantized else weights,
        scales[1] if is_quantized else weights,
        state["step"],
        skip,
        weights.numel(),
        start,
        update.moments_key,
        update.weights_key,
        (
            1.0 - update.learning_rate * update.weight_decay,
            float(update.learning_rate),
            float(update.eps),
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            _log2(beta1),
            _log2(beta2),
        ),
        width=width,
        padded_width=padded_width,
        per_program=per_program,
        is_quantized=is_quantized,
        rounds_first=_is_rounded(state["exp_avg"]),
        rounds_second=_is_rounded(state["exp_avg_sq"]),
        rounds_weights=update.rounds_weights and _is_rounded(weights),
        num_warps=8 if is_quantized else 4,  # with 4, registers spill on Hopper and later
        enable_fp_fusion=False,
    )


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


def _is_rounded(tensor: Tensor) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


@triton.jit
def _random_bits(number, key):
    """Murmur3's finalizer, as in `rounding.random_bits`: of int64 indices, with an int32 key."""
    bits = number.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _to_bfloat16(values, bits):
    rounded = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _level(codes, top: tl.constexpr, roots: tl.constexpr):
    level = tl.div_rn(codes, tl.full(codes.shape, top, tl.float32))
    for _ in tl.static_range(roots):
        level = level * level
    return level


@triton.jit
def _decode(codes, scales, top: tl.constexpr, roots: tl.constexpr):
    numbers = codes.to(tl.float32)
    values = _level(numbers, top, roots) * scales
    return tl.where(numbers < 0.0, -values, values)


@triton.jit
def _encode(values, scales, bits, top: tl.constexpr, roots: tl.constexpr):
    """Return the codes, int32; `bits` are 16 random ones."""
    least = tl.full(scales.shape, 1e-38, tl.float32)
    share = tl.div_rn(tl.abs(values), tl.broadcast_to(tl.maximum(scales, least), values.shape))
    lower = share
    for _ in tl.static_range(roots):
        lower = tl.sqrt_rn(lower)
    lower = tl.minimum(tl.floor(lower * top), top - 1.0)
    below = _level(lower, top, roots)
    above = _level(lower + 1.0, top, roots)
    chance = bits.to(tl.float32) * 1.52587890625e-05  # 2^-16
    codes = tl.where(share - below > (above - below) * chance, lower + 1.0, lower)
    return tl.where(values < 0.0, -codes, tl.where(values > 0.0, codes, 0.0)).to(tl.int32)


@triton.jit
def _read_moment(codes, scales, at, block, inside, is_quantized: tl.constexpr, top: tl.constexpr, roots: tl.constexpr):
    values = tl.load(codes + at, mask=inside, other=0)
    if is_quantized:
        scale = tl.load(scales + block, mask=tl.sum(inside.to(tl.int32), axis=1, keep_dims=True) > 0, other=0.0)
        return _decode(values, scale, top, roots)
    return values.to(tl.float32)


@triton.jit
def _write(
    codes,
    scales,
    values,
    bits,
    at,
    block,
    inside,
    is_quantized: tl.constexpr,
    is_rounded: tl.constexpr,
    top: tl.constexpr,
    roots: tl.constexpr,
):
    if is_quantized:
        scale = tl.max(tl.abs(values), axis=1, keep_dims=True)
        tl.store(codes + at, _encode(values, scale, bits, top, roots).to(codes.dtype.element_ty), mask=inside)
        tl.store(scales + block, scale, mask=tl.sum(inside.to(tl.int32), axis=1, keep_dims=True) > 0)
    elif is_rounded:
        tl.store(codes + at, _to_bfloat16(values, bits), mask=inside)
    else:
        tl.store(codes + at, values.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _block_elements(num_elements, width: tl.constexpr, padded_width: tl.constexpr, per_program: tl.constexpr):
    """Return this program's blocks [blocks, 1], their elements [blocks, padded width], and which of these exist."""
    block = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)[:, None]
    column = tl.arange(0, padded_width)[None, :]
    at = block * width + column
    return block, at, (column < width) & (at < num_elements)


@triton.jit
def _adam_step(m, v, count, rate, eps, log_beta1, log_beta2):
    """Return the amount to subtract from the weights; both corrections are float64 scalars, after `count` updates."""
    count = count.to(tl.float64)
    unbiased = (rate / (1.0 - tl.exp2(count * log_beta1))).to(tl.float32)
    spread = tl.sqrt(1.0 - tl.exp2(count * log_beta2)).to(tl.float32)
    divisor = tl.div_rn(tl.sqrt_rn(v), tl.full(v.shape, 1.0, tl.float32) * spread) + eps
    return tl.div_rn(unbiased * m, divisor)


@triton.jit(do_not_specialize=["start", "moments_key", "weights_key"])
def _update(
    weights,
    gradients,
    first,
    second,
    first_scale,
    second_scale,
    step,
    skip,
    num_elements,
    start,
    moments_key,
    weights_key,
    settings,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    per_program: tl.constexpr,
    is_quantized: tl.constexpr,
    rounds_first: tl.constexpr,
    rounds_second: tl.constexpr,
    rounds_weights: tl.constexpr,
):
    if tl.load(skip) > 0.0:
        return
    decay, rate, eps, first_share, beta2, second_share, log_beta1, log_beta2 = settings
    block, at, inside = _block_elements(num_elements, width, padded_width, per_program)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    m = _read_moment(first, first_scale, at, block, inside, is_quantized, 127.0, 2)
    m = m + first_share * (gradient - m)
    v = _read_moment(second, second_scale, at, block, inside, is_quantized, 255.0, 3)
    v = v * beta2 + second_share * gradient * gradient
    bits = _random_bits(start + at, moments_key)
    _write(first, first_scale, m, bits & 0xFFFF, at, block, inside, is_quantized, rounds_first, 127.0, 2)
    _write(second, second_scale, v, bits >> 16, at, block, inside, is_quantized, rounds_second, 255.0, 3)
    old = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    moved = old * decay - _adam_step(m, v, tl.load(step), rate, eps, log_beta1, log_beta2)
    bits = _random_bits(start + at, weights_key)
    _write(weights, weights, moved, bits & 0xFFFF, at, block, inside, False, rounds_weights, 0.0, 0)
