"""AdamW (Loshchilov & Hutter, 2017) with moments, or weights, stored in fewer bits than it computes with.

Each update is computed in float32, some rows at a time, and rounded stochastically: up or down, so that values are
right on average. Rounded to nearest, moments would stand still: with beta 0.999 a second moment falls by a thousandth
a step, less than half of bfloat16's last place. The random bits of an element are a hash of run.seed, its parameter's
name, the step and its place in the whole tensor: the same on every device, under every strategy, and after a resume.
Blocks of 8-bit moments lie within a row, so FSDP2 does not split them.

On a GPU an update is one kernel per parameter (`low_bit_kernel`), without host-device synchronisation; elsewhere, and
where triton is missing, plain operators do the same. Both heed `found_inf`, as torch's fused optimizers do.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.model.compilation import missing_triton_toolchain
from finetune.runtime import seeds
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import local_rows
from finetune.train.optim.parameter_groups import NamedParameter
from finetune.train.optim.rounding import (
    BLOCK_SIZE,
    SIGNED_8BIT,
    UNSIGNED_8BIT,
    high_half,
    low_half,
    random_bits,
    signed,
    to_bfloat16,
)

with lazily():
    from finetune.train.optim import low_bit_kernel as kernel

ROUNDING_KEYS = "rounding_keys"
"""The key of a group that holds a number for each of its parameters, derived from the seed and the name."""

ROUNDING_STEP = "rounding_step"
"""The key of a group that holds the number of its next step, from which random bits are derived, from 1."""

FIRST, SECOND, SCALE = "exp_avg", "exp_avg_sq", "_scale"
_MOMENT_KEYS = (FIRST, SECOND, FIRST + SCALE, SECOND + SCALE)

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

    def tensors(self) -> list[Tensor]:
        """Return what an update writes."""
        return [self.weights, *self.state.values()]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with low-bit states or stochastically rounded weights."""

    _step_supports_amp_scaling = True  # what torch's fused optimizers are recognised by: `found_inf` is heeded

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
        """Update all parameters that have a gradient, unless `found_inf` is 1: then neither weights nor state change.

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
                _local(parameter.grad).div_(grad_scale)
        skip = None if found_inf is None else found_inf.reshape(())
        self._count([parameter for parameter, _, _ in updates], skip=skip)
        for parameter, group, key in updates:
            self._update(parameter, group, key=key, skip=skip)

    def _count(self, parameters: Sequence[Tensor], *, skip: Tensor | None) -> None:
        """Count an update of these parameters, where it is not skipped."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if not isinstance(state["step"], Tensor):  # as older checkpoints of `torch.save` have it
                state["step"] = torch.tensor(float(state["step"]), device=parameter.device)
            by_device.setdefault(state["step"].device, []).append(state["step"])
        for device, counts in by_device.items():
            if skip is None:
                torch._foreach_add_(counts, 1.0)
            else:
                torch._foreach_add_(counts, [1.0 - skip.to(device, torch.float32)] * len(counts))

    def _update(self, parameter: Tensor, group: Mapping[str, Any], *, key: int, skip: Tensor | None) -> None:
        state = self.state[parameter]
        step = group.get(ROUNDING_STEP)
        if step is None:  # the loop sets it; without a loop, the device is asked
            step = int(state["step"].item())
        key = seeds.derive_seed(key, step)
        if has_kernel(parameter.device):
            self._launch(parameter, group, key=key, skip=skip)
            return
        factors = _host_factors if parameter.device.type == "cpu" and skip is None else _device_factors
        rate, spread = factors(state["step"], group)
        for rows in _chunks(parameter, state):
            before = [each.clone() for each in rows.tensors()] if skip is not None else []
            self._update_rows(rows, group, key=key, rate=rate, spread=spread)
            if skip is not None:
                for tensor, old in zip(rows.tensors(), before, strict=True):
                    tensor.copy_(torch.where(skip > 0, old, tensor))

    def _launch(self, parameter: Tensor, group: Mapping[str, Any], *, key: int, skip: Tensor | None) -> None:
        """Update the parameter by one kernel."""
        update = kernel.KernelUpdate(
            learning_rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            moments_key=signed(key),
            weights_key=signed(~key),
            rounds_weights=self._rounds_weights,
        )
        for rows in _chunks(parameter, self.state[parameter], is_whole=True):  # none, where this rank has no row
            kernel.launch_update(
                rows.weights,
                rows.gradient.contiguous(),
                state={**rows.state, "step": self.state[parameter]["step"]},
                start=rows.start,
                skip=torch.zeros((), device=parameter.device) if skip is None else skip.to(parameter.device),
                update=update,
            )

    def _first_state(self, parameter: Tensor) -> dict[str, Any]:
        width = _block_width(parameter)
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if self._state_dtype != torch.int8 or width is None:
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
        weights = _updated_weights(rows.weights, first, second, group=group, rate=rate, spread=spread)
        if self._rounds_weights and rows.weights.dtype == torch.bfloat16:
            bits = random_bits(rows.start, stop, key=~key, device=gradient.device).view_as(gradient)
            rows.weights.copy_(to_bfloat16(weights, low_half(bits)))
        elif rows.weights is not weights:
            rows.weights.copy_(weights)


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether updates on this device are one kernel each: on a CUDA device, where triton works."""
    return device.type == "cuda" and missing_triton_toolchain() is None


def set_rounding_step(group: dict[str, Any], *, step: int) -> None:
    """Set the number from which a group's random bits are derived, for the update that follows `step` steps."""
    if ROUNDING_KEYS in group:
        group[ROUNDING_STEP] = step + 1


def add_rounding_keys(
    groups: Sequence[dict[str, Any]], named: Sequence[NamedParameter], *, seed: int
) -> list[dict[str, Any]]:
    """Return the groups with what the bits of each of their parameters is drawn from."""
    names = {id(each.parameter): each.name for each in named}
    return [
        {**group, ROUNDING_KEYS: [seeds.derive_seed(seed, "rounding", names[id(each)]) for each in group["params"]]}
        for group in groups
    ]


def _host_factors(count: Tensor, group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the corrected rate, negative, and the root of the second moment's correction after `count` updates."""
    step, (beta1, beta2) = int(count.item()), group["betas"]
    return -group["lr"] / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)


def _device_factors(count: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the same as float32 scalars on the device, where alone it is known how many steps were skipped."""
    step, (beta1, beta2) = count.to(torch.float64), group["betas"]
    rate = -group["lr"] / (1.0 - torch.pow(beta1, step))
    return rate.to(torch.float32), (1.0 - torch.pow(beta2, step)).sqrt().to(torch.float32)


def _updated_weights(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    group: Mapping[str, Any],
    rate: float | Tensor,
    spread: float | Tensor,
) -> Tensor:
    """Return the weights after AdamW's update, float32; the moments are used up. Float32 weights are moved in place."""
    moved = weights.to(torch.float32).mul_(1.0 - group["lr"] * group["weight_decay"])
    divisor = second.sqrt().div_(spread).add_(group["eps"])
    if isinstance(rate, Tensor):
        return moved.add_(first.mul(rate).div_(divisor))
    return moved.addcdiv_(first, divisor, value=rate)


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
    elif state[name] is not values:
        state[name].copy_(values)


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


def _chunks(parameter: Tensor, state: Mapping[str, Any], *, is_whole: bool = False) -> Iterator[_RowChunk]:
    """Yield what this rank holds of the parameter, some rows at a time or at once; a vector has rows of one number."""
    local = local_rows(parameter)
    assert local is not None and parameter.grad is not None, "refused at the start (strategy/reconcile.py)"
    weights, gradient = _local(parameter), _local(parameter.grad)
    if not weights.numel():
        return
    width = weights.numel() // local[1]
    tensors = {
        name: _local(value).view(local[1], -1)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
