"""Workarounds for libraries; `tests/task/test_upstream.py` fails where one is no longer needed."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from finetune.runtime import distributed

TOKENS_BETWEEN_QUESTIONS = 8
"""After how many tokens ranks that generate together ask whether all of them are done."""


@contextmanager
def throttle_generate_sync(inner: nn.Module, *, max_new_tokens: int) -> Iterator[None]:
    """Have the ranks on which `generate` runs meanwhile ask every few tokens, and not after each, whether all are done.

    transformers sums a flag over the ranks before each token, on the device, and waits for it
    (`_has_unfinished_sequences` in generation/utils.py, 5.17 to 5.24). Between two questions a rank that is done runs
    up to 7 more forward passes whose tokens it drops; all stop together after `max_new_tokens`.
    """
    num_passes = 0

    def has_unfinished_sequences(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        nonlocal num_passes
        num_done, num_passes = num_passes, num_passes + 1
        if not synced_gpus:
            return not this_peer_finished
        if num_done == 0 or num_done >= max_new_tokens or num_done % TOKENS_BETWEEN_QUESTIONS:
            return num_done < max_new_tokens
        return distributed.sum_counts([int(not this_peer_finished)]) != [0]

    inner.__dict__[_ASKS] = has_unfinished_sequences
    try:
        yield
    finally:
        del inner.__dict__[_ASKS]


_ASKS = "_has_unfinished_sequences"


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
    own_forward, is_inside = inner.forward, False

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

    with replaced_forward(inner, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have the module's forward pass done by this function meanwhile, and by the former one afterwards."""
    attributes = module.__dict__
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
