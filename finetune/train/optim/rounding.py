"""Low-bit numbers: random bits that are the same on every device, stochastic rounding and blockwise 8-bit codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 256
"""Number of values that share a scale (the block size of Dettmers et al., 2022, arXiv:2110.02861)."""

_MIX, _FIRST, _SECOND = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32  # as int32


def random_bits(start: int, stop: int, *, key: int, device: torch.device) -> Tensor:
    """Return 32 random bits, as int32, per element of [start, stop): murmur3's finalizer of the element's index."""
    bits = torch.arange(start, stop, dtype=torch.int64, device=device).to(torch.int32)  # the lower half of an index
    bits.mul_(_MIX).add_(signed(key))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values rounded stochastically to bfloat16.

    A value is rounded up with a probability equal to its relative distance from the next value below. `bits` holds an
    int32 with 16 random bits per value.
    """
    return (values.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def low_half(bits: Tensor) -> Tensor:
    """Return the lower 16 bits."""
    return bits & 0xFFFF


def high_half(bits: Tensor) -> Tensor:
    """Return the upper 16 bits."""
    return (bits >> 16).bitwise_and_(0xFFFF)


@dataclass(frozen=True)
class BlockQuantizer:
    """Blockwise 8-bit quantization: value = sign(code) * scale * (|code| / top) ** 2^roots.

    The square roots concentrate the codes near zero, so that small values in a block with a large one keep precision.
    """

    dtype: torch.dtype
    top: int
    roots: int

    def encode(self, values: Tensor, scales: Tensor, bits: Tensor) -> Tensor:
        """Return the codes of `values` [blocks, width] for `scales` [blocks, 1], rounded by `bits` in [0, 1)."""
        share = values.abs().div_(scales.clamp(min=1e-38))
        lower = share.clone()
        for _ in range(self.roots):
            lower.sqrt_()
        lower.mul_(self.top).floor_().clamp_(max=self.top - 1)
        below, above = self._level(lower), self._level(lower + 1.0)
        is_up = share.sub_(below) > above.sub_(below).mul_(bits)
        codes = lower.add_(is_up)
        return (codes.mul_(values.sign()) if self.dtype.is_signed else codes).to(self.dtype)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values, float32."""
        numbers = codes.to(torch.float32)
        values = self._level(numbers).mul_(scales)
        return values.mul_(numbers.sign_()) if self.dtype.is_signed else values

    def _level(self, codes: Tensor) -> Tensor:
        level = codes / self.top
        for _ in range(self.roots):
            level = level.square_()
        return level


SIGNED_8BIT = BlockQuantizer(torch.int8, top=127, roots=2)
"""For first moments: codes are 1% apart at the largest value of a block and 16% apart at 1e-4 of it."""

UNSIGNED_8BIT = BlockQuantizer(torch.uint8, top=255, roots=3)
"""For second moments, which span a wider range and must not become zero: 3% apart at the largest, 10% at 1e-4."""


def signed(number: int) -> int:
    """Return the lowest 32 bits of the number as a signed int32."""
    return (number + 2**31) % 2**32 - 2**31
