"""AdamW (Loshchilov & Hutter, 2017) whose moments or weights are stored in lower precision than its arithmetic.

Updates are computed in float32, a few rows at a time, and rounded stochastically, so that values are unbiased. Rounding
to nearest would stall the moments: with beta 0.999 a second moment decays by a thousandth per step, less than half a
unit in the last place of bfloat16. The random bits of an element are a hash of run.seed, the parameter's name, the step
and the element's index in the full tensor: identical on every device, under every strategy and after a resume. Blocks
of 8-bit moments do not cross rows, so FSDP2 does not split them.

On a GPU an update is one kernel per parameter (`low_bit_kernel`), without host-device synchronization; on other devices
and without triton, it uses plain operators. Both respect `found_inf`, as torch's fused optimizers do.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.model.kernels.compilation import missing_triton_toolchain
from finetune.runtime import seeds
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import local_rows, local_tensor

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


with lazily():
    from finetune.train.optim import low_bit_kernel as kernel

ROUNDING_KEYS = "rounding_keys"
"""The parameter-group key of one integer per parameter, derived from the seed and the parameter's name."""

ROUNDING_STEP = "rounding_step"
"""The parameter-group key of the next step's number, counted from 1, from which random bits are derived."""

FIRST, SECOND, SCALE = "exp_avg", "exp_avg_sq", "_scale"
_MOMENT_KEYS = (FIRST, SECOND, FIRST + SCALE, SECOND + SCALE)

_NARROWEST = 32  # scales of smaller blocks cost too much: these moments, and the moments of vectors, stay in float32
_CHUNK = {"cpu": 1 << 16}  # elements at a time: fits a core's cache; other devices use _CHUNK_ELSEWHERE
_CHUNK_ELSEWHERE = 1 << 22


@dataclass(frozen=True)
class _RowChunk:
    """Some rows of a parameter on this rank, as views: [rows, width]."""

    start: int  # index of the first element within the full parameter
    weights: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that an update writes."""
        return [self.weights, *self.state.values()]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with low-bit states or stochastically rounded weights."""

    _step_supports_amp_scaling = True  # as in torch's fused optimizers: `step` respects `found_inf`

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
        """Store moments in `state_dtype` (None: the weights' dtype); `rounds_weights` rounds bf16 weights."""
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._state_dtype = state_dtype
        self._rounds_weights = rounds_weights

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; if `found_inf` is 1, neither weights nor state change.

        `found_inf` and `grad_scale` are attributes that `torch.amp.GradScaler` and `train.update` set.
        """
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        updates = [
            (parameter, group, key)
            for group in self.param_groups
            for parameter, key in zip(group["params"], group[ROUNDING_KEYS], strict=True)
            if parameter.grad is not None
        ]
        for parameter, _, _ in updates:
            if not self.state[parameter]:
                self.state[parameter].update(self._first_state(parameter))
            if grad_scale is not None:
                local_tensor(parameter.grad).div_(grad_scale)
        skip = None if found_inf is None else found_inf.reshape(())
        # Each parameter counts its updates; a skipped one is not counted.
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter, _, _ in updates:
            count = self.state[parameter]["step"]
            by_device.setdefault(count.device, []).append(count)
        for device, counts in by_device.items():
            if skip is None:
                torch._foreach_add_(counts, 1.0)
            else:
                torch._foreach_add_(counts, [1.0 - skip.to(device, torch.float32)] * len(counts))
        for parameter, group, key in updates:
            self._update(parameter, group, key=key, skip=skip)

    def _update(self, parameter: Tensor, group: Mapping[str, Any], *, key: int, skip: Tensor | None) -> None:
        state = self.state[parameter]
        step = group.get(ROUNDING_STEP)
        if step is None:  # the training loop sets it; without one, read it from the device
            step = int(state["step"].item())
        key = seeds.derive_seed(key, step)
        if has_kernel(parameter.device):
            self._launch(parameter, group, key=key, skip=skip)
            return
        # the negative bias-corrected learning rate, and the root of the second moment's bias correction
        rate: float | Tensor
        spread: float | Tensor
        beta1, beta2 = group["betas"]
        if parameter.device.type == "cpu" and skip is None:
            count = int(state["step"].item())
            rate = -group["lr"] / (1.0 - beta1**count)
            spread = math.sqrt(1.0 - beta2**count)
        else:  # only the device knows the number of skipped steps
            steps = state["step"].to(torch.float64)
            rate = (-group["lr"] / (1.0 - torch.pow(beta1, steps))).to(torch.float32)
            spread = (1.0 - torch.pow(beta2, steps)).sqrt().to(torch.float32)
        for rows in _chunks(parameter, state):
            before = [tensor.clone() for tensor in rows.tensors()] if skip is not None else []
            self._update_rows(rows, group, key=key, rate=rate, spread=spread)
            if skip is not None:
                for tensor, old in zip(rows.tensors(), before, strict=True):
                    tensor.copy_(torch.where(skip > 0, old, tensor))

    def _launch(self, parameter: Tensor, group: Mapping[str, Any], *, key: int, skip: Tensor | None) -> None:
        """Update the parameter with one kernel."""
        update = kernel.KernelUpdate(
            learning_rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            moments_key=signed(key),
            weights_key=signed(~key),
            rounds_weights=self._rounds_weights,
        )
        for rows in _chunks(parameter, self.state[parameter], is_whole=True):  # empty if this rank has no row
            kernel.launch_update(
                rows.weights,
                rows.gradient.contiguous(),
                state={**rows.state, "step": self.state[parameter]["step"]},
                start=rows.start,
                skip=torch.zeros((), device=parameter.device) if skip is None else skip.to(parameter.device),
                update=update,
            )

    def _first_state(self, parameter: Tensor) -> dict[str, Any]:
        row = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 1
        width = max(width for width in range(1, BLOCK_SIZE + 1) if row % width == 0)  # of a block
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if self._state_dtype != torch.int8 or width < _NARROWEST:
            dtype = torch.float32 if self._state_dtype == torch.int8 else self._state_dtype or parameter.dtype
            return {"step": count, FIRST: _zeros(parameter, dtype), SECOND: _zeros(parameter, dtype)}
        num_blocks = math.prod(parameter.shape[1:]) // width
        return {
            "step": count,
            FIRST: _zeros(parameter, SIGNED_8BIT.dtype),
            FIRST + SCALE: _zeros(parameter, torch.float32, width=num_blocks),
            SECOND: _zeros(parameter, UNSIGNED_8BIT.dtype),
            SECOND + SCALE: _zeros(parameter, torch.float32, width=num_blocks),
        }

    def _update_rows(
        self, rows: _RowChunk, group: Mapping[str, Any], *, key: int, rate: float | Tensor, spread: float | Tensor
    ) -> None:
        stop = rows.start + rows.weights.numel()
        gradient = rows.gradient.to(torch.float32)
        first, second = _moments(rows.state)
        first.lerp_(gradient, 1.0 - group["betas"][0])
        second.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1.0 - group["betas"][1])
        if self._state_dtype != torch.float32:
            bits = random_bits(rows.start, stop, key=key, device=gradient.device).view_as(gradient)
            _store_moment(rows.state, FIRST, first, low_half(bits))
            _store_moment(rows.state, SECOND, second, high_half(bits))
        weights = rows.weights.to(torch.float32).mul_(1.0 - group["lr"] * group["weight_decay"])  # float32: in place
        divisor = second.sqrt().div_(spread).add_(group["eps"])
        if isinstance(rate, Tensor):
            weights.add_(first.mul(rate).div_(divisor))
        else:
            weights.addcdiv_(first, divisor, value=rate)
        if self._rounds_weights and rows.weights.dtype == torch.bfloat16:
            bits = random_bits(rows.start, stop, key=~key, device=gradient.device).view_as(gradient)
            rows.weights.copy_(to_bfloat16(weights, low_half(bits)))
        elif rows.weights is not weights:
            rows.weights.copy_(weights)


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether updates on this device run as one kernel each: on a CUDA device with a working triton."""
    return device.type == "cuda" and missing_triton_toolchain() is None


def _moments(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both moments in float32: the tensors themselves if they are float32, else copies."""
    if FIRST + SCALE not in state:
        return state[FIRST].to(torch.float32), state[SECOND].to(torch.float32)
    decoded = [
        coding.decode(_blocks(state, name), state[name + SCALE].reshape(-1, 1)).view(state[name].shape)
        for name, coding in ((FIRST, SIGNED_8BIT), (SECOND, UNSIGNED_8BIT))
    ]
    return decoded[0], decoded[1]


def _store_moment(state: Mapping[str, Tensor], name: str, values: Tensor, bits: Tensor) -> None:
    """Store a moment, rounded stochastically with 16 random bits per element."""
    if name + SCALE in state:
        blocks = values.view(_blocks(state, name).shape)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        coding = SIGNED_8BIT if name == FIRST else UNSIGNED_8BIT
        codes = coding.encode(blocks, scales, bits.view(blocks.shape).to(torch.float32).mul_(2.0**-16))
        state[name].copy_(codes.view_as(state[name]))
        state[name + SCALE].copy_(scales.view_as(state[name + SCALE]))
    elif state[name].dtype == torch.bfloat16:
        state[name].copy_(to_bfloat16(values, bits))
    elif state[name] is not values:
        state[name].copy_(values)


def _blocks(state: Mapping[str, Tensor], name: str) -> Tensor:
    return state[name].reshape(state[name + SCALE].numel(), -1)


def _zeros(parameter: Tensor, dtype: torch.dtype, *, width: int | None = None) -> Tensor:
    """Return zeros sharded like the parameter: of the same shape, or with rows of `width` elements."""
    if width is None:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    if not isinstance(parameter, DTensor):
        return torch.zeros(parameter.shape[0], width, dtype=dtype, device=parameter.device)
    local = torch.zeros(parameter.to_local().shape[0], width, dtype=dtype, device=parameter.device)
    shape = torch.Size((parameter.shape[0], width))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(width, 1)
    )


def _chunks(parameter: Tensor, state: Mapping[str, Any], *, is_whole: bool = False) -> Iterator[_RowChunk]:
    """Yield this rank's rows of the parameter, in chunks or all at once; the rows of a vector have one element."""
    local = local_rows(parameter)
    assert local is not None and parameter.grad is not None, "rejected at startup (strategy/reconcile.py)"
    weights, gradient = local_tensor(parameter), local_tensor(parameter.grad)
    if not weights.numel():
        return
    width = weights.numel() // local[1]
    tensors = {
        name: local_tensor(value).view(local[1], -1)
        for name, value in state.items()
        if isinstance(value, Tensor) and name in _MOMENT_KEYS
    }
    flat = weights.view(local[1], width) if weights.is_contiguous() else weights.reshape(local[1], width)
    num_rows = local[1] if is_whole else max(1, _CHUNK.get(weights.device.type, _CHUNK_ELSEWHERE) // width)
    for row in range(0, local[1], num_rows):
        some = slice(row, row + num_rows)
        parts = {name: value[some] for name, value in tensors.items()}
        yield _RowChunk((local[0] + row) * width, flat[some], gradient.reshape(local[1], width)[some], parts)
    if not weights.is_contiguous():
        weights.copy_(flat.view(weights.shape))
