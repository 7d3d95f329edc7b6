"""Creates the state of an optimizer without an update, so that loading can write into it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.registry.optimizers import state_of_class
from finetune.runtime.parameters import AVERAGE, AVERAGE_DECAY

_ADAM_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
"""Exactly these classes: their state is numbers and tensors laid out like the parameter, the same for each."""


def create_state_by_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state for all parameters, by a step with zero gradients and learning rate 0.

    Only the optimizer knows keys, dtypes and devices of its state. Some optimizers change parameters even in
    such a step, so the caller must overwrite parameters and state afterwards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with zero_gradients(parameters), no_learning_rate(optimizer):
        optimizer.step()


def create_empty_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the same state faster but uninitialized, for a caller that overwrites all of it.

    Adam's moments are allocated without gradients and without a pass over their memory; the keys and dtypes come from
    an optimizer of the same class with a single element.
    """
    # Hooks may keep further state, such as an average of the weights.
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    if type(optimizer) not in _ADAM_CLASSES or has_hooks:
        create_state_by_step(optimizer)
        return
    build: Any = type(optimizer)
    for group in optimizer.param_groups:
        examples: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for parameter in group["params"]:
            kind = (parameter.dtype, parameter.device)
            if kind not in examples:
                single = torch.zeros(1, dtype=kind[0], device=kind[1], requires_grad=True)
                single.grad = torch.zeros_like(single)
                example = build([{**group, "params": [single]}])
                with no_learning_rate(example):
                    example.step()
                examples[kind] = example.state[single]
            optimizer.state[parameter] = {
                key: torch.empty_like(parameter, dtype=value.dtype) if value.dim() else value.clone()
                for key, value in examples[kind].items()
            }


def expected_state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the keys of the state that the optimizer will keep for each element of a parameter.

    Empty for unknown optimizers, and for optimizers that keep less per element (Adafactor, 8-bit AdamW).
    """
    average = (AVERAGE,) if any(AVERAGE_DECAY in group for group in optimizer.param_groups) else ()
    return (*state_of_class(type(optimizer).__name__).keys_for(optimizer.defaults), *average)


@contextmanager
def zero_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set the gradients to zeros, and restore them afterwards (ZeRO-Offload keeps its buffers there)."""
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
    """Set the learning rate of every group to 0, and restore it afterwards."""
    before: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
