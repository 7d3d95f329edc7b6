"""The state that an optimizer creates in its first update, created without one, so that loading can write into it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.runtime.parameters import AVERAGE, AVERAGE_DECAY

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE_KEYS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "DeepSpeedCPUAdam", "FusedAdam"), _MOMENTS),
    **dict.fromkeys(("Lion", "DeepSpeedCPULion", "FusedLion"), ("exp_avg",)),
    **dict.fromkeys(("Adagrad", "DeepSpeedCPUAdagrad"), ("sum",)),
    **{"RMSprop": ("square_avg",), "Adadelta": ("acc_delta", "square_avg")},
    **{"MuonAndAdamW": _MOMENTS, "ScheduleFreeAdamW": ("exp_avg_sq", "z")},  # Muon's matrices keep one, not two
}

_ADAM_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers, these very classes, that keep of every parameter the same: numbers, and tensors laid out like it."""


def create_state_by_step(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state for all its parameters by a step with zero gradients and no learning rate.

    Only the optimizer knows its state's names, types and devices. Some rules move parameters in such a step all the
    same: it is for a caller that overwrites parameters and state afterwards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with zero_gradients(parameters), no_learning_rate(optimizer):
        optimizer.step()


def create_empty_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the same state faster, for a caller that overwrites every number of it.

    Adam's moments are memory as it comes, without a gradient and a pass over all of it; what else there is, and of
    which type, is asked of a twin with a single number.
    """
    if type(optimizer) not in _ADAM_CLASSES or _has_hooks(optimizer):
        create_state_by_step(optimizer)
        return
    for group in optimizer.param_groups:
        twins: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for parameter in group["params"]:
            kind = (parameter.dtype, parameter.device)
            if kind not in twins:
                twins[kind] = _twin_state(optimizer, group, kind)
            optimizer.state[parameter] = {
                key: torch.empty_like(parameter, dtype=value.dtype) if value.dim() else value.clone()
                for key, value in twins[kind].items()
            }


def expected_state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the words of what the optimizer will keep for each number of a parameter.

    Nothing for optimizers that keep a fraction of a number each (Adafactor, 8-bit AdamW) or are not known.
    """
    average = (AVERAGE,) if any(AVERAGE_DECAY in group for group in optimizer.param_groups) else ()
    return (*_own_state_keys(optimizer), *average)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether something beside the optimizer's own rule may keep state (an average of the weights)."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _twin_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], kind: tuple[torch.dtype, torch.device]
) -> dict[str, Tensor]:
    """Return what such an optimizer keeps for a parameter of one number."""
    single = torch.zeros(1, dtype=kind[0], device=kind[1], requires_grad=True)
    single.grad = torch.zeros_like(single)
    build: Any = type(optimizer)
    twin: torch.optim.Optimizer = build([{**group, "params": [single]}])
    with no_learning_rate(twin):
        twin.step()
    state: dict[str, Tensor] = twin.state[single]
    return state


def _own_state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    settings, name = optimizer.defaults, type(optimizer).__name__
    if name in ("SGD", "RMSprop") and settings.get("momentum"):
        return ("momentum_buffer", *_STATE_KEYS.get(name, ()))
    if settings.get("amsgrad"):
        return (*_STATE_KEYS.get(name, ()), "max_exp_avg_sq")
    return _STATE_KEYS.get(name, ())


@contextmanager
def zero_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give the parameters gradients of zeros, and back what they had (ZeRO-Offload keeps its buffers there)."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


@contextmanager
def no_learning_rate(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set every group's learning rate to 0, and to what it was afterwards."""
    before: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
