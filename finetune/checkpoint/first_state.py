"""The state that an optimizer makes at its first update, made without an update: what loading writes into."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.runtime.average import DECAY, STATE

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EXPECTED = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "DeepSpeedCPUAdam", "FusedAdam"), _MOMENTS),
    **dict.fromkeys(("Lion", "DeepSpeedCPULion", "FusedLion"), ("exp_avg",)),
    **dict.fromkeys(("Adagrad", "DeepSpeedCPUAdagrad"), ("sum",)),
    **{"RMSprop": ("square_avg",), "Adadelta": ("acc_delta", "square_avg")},
    **{"MuonAndAdamW": _MOMENTS, "ScheduleFreeAdamW": ("exp_avg_sq", "z")},  # Muon's matrices keep one, not two
}


def make_first_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state for all its parameters by a step with zero gradients and no learning rate.

    Only the optimizer knows its state's names, types and devices. Some rules move parameters in such a step all the
    same: it is for a caller that overwrites parameters and state afterwards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with zero_gradients(parameters), no_learning_rate(optimizer):
        optimizer.step()


def expected_state(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the words of what the optimizer will keep for each number of a parameter.

    Nothing for optimizers that keep a fraction of a number each (Adafactor, 8-bit AdamW) or are not known.
    """
    average = (STATE,) if any(DECAY in group for group in optimizer.param_groups) else ()
    return (*_own_state(optimizer), *average)


def _own_state(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    settings, name = optimizer.defaults, type(optimizer).__name__
    if name in ("SGD", "RMSprop") and settings.get("momentum"):
        return ("momentum_buffer", *_EXPECTED.get(name, ()))
    if settings.get("amsgrad"):
        return (*_EXPECTED.get(name, ()), "max_exp_avg_sq")
    return _EXPECTED.get(name, ())


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
