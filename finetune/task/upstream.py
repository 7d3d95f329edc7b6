"""Workarounds for libraries; `tests/task/test_upstream.py` fails when one is no longer needed."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from finetune.runtime import distributed

TOKENS_BETWEEN_SYNCS = 8
"""The number of tokens after which ranks that generate together check whether all are done."""


@contextmanager
def throttle_generate_sync(inner: nn.Module, *, max_new_tokens: int) -> Iterator[None]:
    """Make ranks in `generate` check only every few tokens, not after every token, whether all of them are done.

    transformers sums a flag over the ranks before each token, on the device, and waits for it
    (`_has_unfinished_sequences` in generation/utils.py, 5.17 to 5.24). Between two checks, a rank that is done runs up
    to 7 more forward passes and drops their tokens; all ranks stop together after `max_new_tokens`.
    """
    num_passes = 0

    def has_unfinished_sequences(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        nonlocal num_passes
        num_done, num_passes = num_passes, num_passes + 1
        if not synced_gpus:
            return not this_peer_finished
        if num_done == 0 or num_done >= max_new_tokens or num_done % TOKENS_BETWEEN_SYNCS:
            return num_done < max_new_tokens
        return distributed.sum_counts([int(not this_peer_finished)]) != [0]

    inner.__dict__[_SYNC_METHOD] = has_unfinished_sequences
    try:
        yield
    finally:
        del inner.__dict__[_SYNC_METHOD]


_SYNC_METHOD = "_has_unfinished_sequences"


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
