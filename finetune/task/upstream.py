"""Workarounds for libraries; `tests/task/test_upstream.py` fails where one is no longer needed."""

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def through_wrappers(model: nn.Module, inner: nn.Module, *, dropped: Collection[str] = ()) -> Iterator[None]:
    """Send calls of the innermost model through everything that wraps it, without the `dropped` arguments.

    transformers' `generate` calls the model whose method it is (transformers 5.23, generation/utils.py, `_sample`) and
    so bypasses its wrappers. But FSDP2 gathers the parameters of its root, which is peft's model where there is one, in
    the root's forward pass, and DeepSpeed's engine prepares each pass in its own.
    """
    if model is inner:
        yield
        return
    attributes, own_forward, is_inside = inner.__dict__, inner.forward, False
    before = attributes.get("forward")

    @functools.wraps(own_forward)
    def forward(*values: Any, **named: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return own_forward(*values, **named)
        for name in dropped:
            named.pop(name, None)
        is_inside = True
        try:
            return model(*values, **named)
        finally:
            is_inside = False

    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
