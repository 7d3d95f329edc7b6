"""AdamW (Loshchilov & Hutter, 2017) with moments, or weights, stored in fewer bits than it computes with.

Each update is computed in float32, some rows at a time, and rounded stochastically: up or down, so that values are
right on average. Rounded to nearest, moments would stand still: with beta 0.999 a second moment falls by a thousandth
a step, less than half of bfloat16's last place. The random bits of an element are a hash of run.seed, its parameter's
name, the count of updates and its place in the whole tensor: the same on every device, under every strategy, and
after a resume. Blocks of 8-bit moments lie within a row, so FSDP2 does not split them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.runtime import seeds
from finetune.runtime.parameters import local_rows
from finetune.train.optim.parameter_groups import NamedParameter

BLOCK_SIZE = 256
"""Values that share a scale (Dettmers et al., 2022, arXiv:2110.02861, take as many)."""

_MIX, _FIRST, _SECOND = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32  # as int32


def random_bits(start: int, stop: int, *, key: int, device: torch.device) -> Tensor:
    """Return 32 random bits, as int32, for each of the elements [start, stop): murmur3's last mixing of its number."""
    bits = torch.arange(start, stop, dtype=torch.int64, device=device).to(torch.int32)  # the lower half of a number
    bits.mul_(_MIX).add_(_signed(key))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values as bfloat16, each up with the probability of its distance from the value below.

    `bits` holds an int32 of 16 random bits for each.
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
    """How a block's values become 8-bit codes: value = scale * (code / top) ** 2^roots, of the code's sign.

    Square roots crowd the codes near zero, so that small values beside a large one keep theirs.
    """

    dtype: torch.dtype
    top: int
    roots: int

    def encode(self, values: Tensor, scales: Tensor, bits: Tensor) -> Tensor:
        """Return the codes of `values` [blocks, width] under their `scales` [blocks, 1]; `bits` in [0, 1) rounds."""
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
"""For a first moment: 1% apart at the largest value of a block, 16% apart at a ten-thousandth of it."""

UNSIGNED_8BIT = BlockQuantizer(torch.uint8, top=255, roots=3)
"""For a second moment, which spans more and must not become zero: 3% apart at the largest, 10% at a ten-thousandth."""


def _signed(number: int) -> int:
    """Return the lowest 32 bits as an int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


ROUNDING_KEYS = "rounding_keys"
"""The key of a group that holds a number for each of its parameters, derived from the seed and the name."""

FIRST, SECOND, SCALE = "exp_avg", "exp_avg_sq", "_scale"

_NARROWEST = 32  # a block below this spends too much on its scale: such moments, and vectors' ones, stay in float32
_CHUNK = {"cpu": 1 << 16}  # elements at a time: what fits a core's cache; on other devices a number of its own
_CHUNK_ELSEWHERE = 1 << 22


@dataclass(frozen=True)
class _RowChunk:
    """Some rows of a parameter on this rank, all views: [rows, width]."""

    start: int  # number of the first element within the whole parameter
    weights: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with low-bit states or stochastically rounded weights."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype | None,
        rounds_weights: bool,
    ) -> None:
        """Store moments in `state_dtype`, None: that of the weights; `rounds_weights`: bf16 weights, stochastically."""
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._state_dtype = state_dtype
        self._rounds_weights = rounds_weights

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter, key in zip(group["params"], group[ROUNDING_KEYS], strict=True):
                if parameter.grad is not None:
                    self._update(parameter, group, key=key)

    def _update(self, parameter: Tensor, group: Mapping[str, Any], *, key: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        key = seeds.derive_seed(key, state["step"])
        for rows in _chunks(parameter, state):
            self._update_rows(rows, group, step=state["step"], key=key)

    def _first_state(self, parameter: Tensor) -> dict[str, Any]:
        width = _block_width(parameter)
        if self._state_dtype != torch.int8 or width is None:
            dtype = torch.float32 if self._state_dtype == torch.int8 else self._state_dtype or parameter.dtype
            return {"step": 0, FIRST: _zeros(parameter, dtype), SECOND: _zeros(parameter, dtype)}
        num_blocks = math.prod(parameter.shape[1:]) // width
        return {
            "step": 0,
            FIRST: _zeros(parameter, SIGNED_8BIT.dtype),
            FIRST + SCALE: _zeros(parameter, torch.float32, width=num_blocks),
            SECOND: _zeros(parameter, UNSIGNED_8BIT.dtype),
            SECOND + SCALE: _zeros(parameter, torch.float32, width=num_blocks),
        }

    def _update_rows(self, rows: _RowChunk, group: Mapping[str, Any], *, step: int, key: int) -> None:
        stop = rows.start + rows.weights.numel()
        gradient = rows.gradient.to(torch.float32)
        first, second = _moments(rows.state)
        first.lerp_(gradient, 1.0 - group["betas"][0])
        second.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1.0 - group["betas"][1])
        if self._state_dtype != torch.float32:
            bits = random_bits(rows.start, stop, key=key, device=gradient.device).view_as(gradient)
            _store_moment(rows.state, FIRST, first, low_half(bits))
            _store_moment(rows.state, SECOND, second, high_half(bits))
        weights = _updated_weights(rows.weights, first, second, group=group, step=step)
        if self._rounds_weights and rows.weights.dtype == torch.bfloat16:
            bits = random_bits(rows.start, stop, key=~key, device=gradient.device).view_as(gradient)
            rows.weights.copy_(to_bfloat16(weights, low_half(bits)))
        elif rows.weights is not weights:
            rows.weights.copy_(weights)


def add_rounding_keys(
    groups: Sequence[dict[str, Any]], named: Sequence[NamedParameter], *, seed: int
) -> list[dict[str, Any]]:
    """Return the groups with what the bits of each of their parameters is drawn from."""
    names = {id(each.parameter): each.name for each in named}
    return [
        {**group, ROUNDING_KEYS: [seeds.derive_seed(seed, "rounding", names[id(each)]) for each in group["params"]]}
        for group in groups
    ]


def _updated_weights(weights: Tensor, first: Tensor, second: Tensor, *, group: Mapping[str, Any], step: int) -> Tensor:
    """Return the weights after AdamW's update, float32; the moments are used up. Float32 weights are moved in place."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    moved = weights.to(torch.float32).mul_(1.0 - rate * group["weight_decay"])
    scale = math.sqrt(1.0 - beta2**step)
    return moved.addcdiv_(first, second.sqrt().div_(scale).add_(group["eps"]), value=-rate / (1.0 - beta1**step))


def _moments(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both moments in float32: float32 ones themselves, of others a copy."""
    if FIRST + SCALE not in state:
        return state[FIRST].to(torch.float32), state[SECOND].to(torch.float32)
    found = [
        coding.decode(_blocks(state, name), state[name + SCALE].reshape(-1, 1)).view(state[name].shape)
        for name, coding in ((FIRST, SIGNED_8BIT), (SECOND, UNSIGNED_8BIT))
    ]
    return found[0], found[1]


def _store_moment(state: Mapping[str, Tensor], name: str, values: Tensor, bits: Tensor) -> None:
    """Write a moment back, rounded by 16 random bits for each element."""
    if name + SCALE in state:
        blocks = values.view(_blocks(state, name).shape)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        coding = SIGNED_8BIT if name == FIRST else UNSIGNED_8BIT
        codes = coding.encode(blocks, scales, bits.view(blocks.shape).to(torch.float32).mul_(2.0**-16))
        state[name].copy_(codes.view_as(state[name]))
        state[name + SCALE].copy_(scales.view_as(state[name + SCALE]))
    elif state[name].dtype == torch.bfloat16:
        state[name].copy_(to_bfloat16(values, bits))


def _blocks(state: Mapping[str, Tensor], name: str) -> Tensor:
    return state[name].reshape(state[name + SCALE].numel(), -1)


def _block_width(parameter: Tensor) -> int | None:
    """Return how many values of a row share a scale: the most that divides it; None where they would be too few."""
    row = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 1
    widest = max(width for width in range(1, BLOCK_SIZE + 1) if row % width == 0)
    return widest if widest >= _NARROWEST else None


def _zeros(parameter: Tensor, dtype: torch.dtype, *, width: int | None = None) -> Tensor:
    """Return zeros laid out over ranks like the parameter: of its shape, or with `width` numbers in each row."""
    if width is None:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    if not isinstance(parameter, DTensor):
        return torch.zeros(parameter.shape[0], width, dtype=dtype, device=parameter.device)
    local = torch.zeros(parameter.to_local().shape[0], width, dtype=dtype, device=parameter.device)
    shape = torch.Size((parameter.shape[0], width))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(width, 1)
    )


def _chunks(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[_RowChunk]:
    """Yield what this rank holds of the parameter some rows at a time; a vector's rows are of one number."""
    local = local_rows(parameter)
    assert local is not None and parameter.grad is not None, "refused at the start (strategy/reconcile.py)"
    weights, gradient = _local(parameter), _local(parameter.grad)
    if not weights.numel():
        return
    width = weights.numel() // local[1]
    tensors = {name: _local(value).view(local[1], -1) for name, value in state.items() if isinstance(value, Tensor)}
    flat = weights.view(local[1], width) if weights.is_contiguous() else weights.reshape(local[1], width)
    num_rows = max(1, _CHUNK.get(weights.device.type, _CHUNK_ELSEWHERE) // width)
    for row in range(0, local[1], num_rows):
        some = slice(row, row + num_rows)
        parts = {name: value[some] for name, value in tensors.items()}
        yield _RowChunk((local[0] + row) * width, flat[some], gradient.reshape(local[1], width)[some], parts)
    if not weights.is_contiguous():
        weights.copy_(flat.view(weights.shape))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
