"""Workarounds for libraries; `tests/task/test_upstream.py` fails when one is no longer needed."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def through_wrappers(model: nn.Module, inner: nn.Module, *, dropped: Collection[str] = ()) -> Iterator[None]:
    """Redirect calls of the inner model through its wrappers, without the `dropped` arguments.

    transformers' `generate` calls its own model (transformers 5.23, generation/utils.py, `_sample`) and so bypasses
    wrappers. But FSDP2 gathers the root's parameters in the forward pass of the root, which is peft's model if there is
    one, and DeepSpeed's engine prepares every pass in its own forward.
    """
    if model is inner:
        yield
        return
    original_forward, is_inside = inner.forward, False

    @functools.wraps(original_forward)
    def forward(*values: Any, **named: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return original_forward(*values, **named)
        for name in dropped:
            named.pop(name, None)
        is_inside = True
        try:
            return model(*values, **named)
        finally:
            is_inside = False

    with replaced_forward(inner, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward in this context."""
    attributes = module.__dict__
    previous = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if previous is None:
            del attributes["forward"]
        else:
            attributes["forward"] = previous
