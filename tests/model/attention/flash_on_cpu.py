"""Reference implementations of torch's flash attention operators on a CPU, so that their callers run as on a GPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from finetune.model.attention import sample_attention
from finetune.model.attention.sample_attention import AvailableKernels


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: list[int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return each sample's causal attention, [tokens, heads, width], in float32 and with every score in memory."""
    outputs = []
    for start, stop in pairwise(edges):
        scores, _, (_, _, v) = _scores(*(each[start:stop] for each in (query, key, value)), scale, window)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def _scores(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, float, tuple[Tensor, Tensor, Tensor]]:
    """Return one sample's scores, their factor, and its float32 queries, keys and values, [heads, length, width]."""
    q, k, v = (each.transpose(0, 1).float() for each in (query, key, value))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for each in (k, v))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    positions = torch.arange(q.shape[1], device=q.device)
    back = positions[:, None] - positions[None]
    is_seen = (back >= 0) & (back < (window or q.shape[1] + 1))
    return (q @ k.transpose(1, 2) * factor).masked_fill(~is_seen, -torch.inf), factor, (q, k, v)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return the values in the tensor's dtype and memory layout, as the kernels do."""
    return torch.empty_like(tensor).copy_(values)


class FlashOnCpu:
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @torch.autocast("cpu", enabled=False)  # a kernel is below it
    def forward(self, query: Tensor, key: Tensor, value: Tensor, edges: Tensor, *others: Any, **named: Any) -> Any:
        """Compute `aten::_flash_attention_forward`."""
        self.calls["forward"] += 1
        how = self._checked(edges, named, longest=others[1], dropout=others[3], is_causal=others[4])
        outputs, sums = [], []
        for start, stop in pairwise(edges.tolist()):
            scores, _, (_, _, v) = _scores(*(each[start:stop] for each in (query, key, value)), **how)
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
            sums.append(scores.logsumexp(-1))
        nothing = query.new_empty(0)
        return _like(query, torch.cat(outputs)), torch.cat(sums, 1), torch.zeros(2).to(torch.uint64), nothing, nothing

    @torch.autocast("cpu", enabled=False)  # a kernel is below it
    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
        """Compute `aten::_flash_attention_backward` without autograd, which an operator's kernel lacks."""
        self.calls["backward"] += 1
        edges, parts = others[2], []
        how = self._checked(edges, named, longest=others[4], dropout=others[6], is_causal=others[7])
        for start, stop in pairwise(edges.tolist()):
            scores, factor, (q, k, v) = _scores(*(each[start:stop] for each in (query, key, value)), **how)
            weights, upper = scores.softmax(-1), grad[start:stop].transpose(0, 1).float()
            of_weights = upper @ v.transpose(1, 2)
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
            found = (of_scores @ k, of_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ upper)
            groups = zip(found, (query, key, value), strict=True)
            parts.append([each.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1) for each, like in groups])
        of_each = (torch.cat(each) for each in zip(*parts, strict=True))
        return tuple(map(_like, (query, key, value), of_each))

    def _checked(
        self, edges: Tensor, named: dict[str, Any], *, longest: int, dropout: float, is_causal: bool
    ) -> dict[str, Any]:
        assert edges.dtype == torch.int32
        assert longest == max(stop - start for start, stop in pairwise(edges.tolist()))
        assert dropout == 0
        left, right = named.get("window_size_left"), named.get("window_size_right")
        assert (left == -1) == is_causal
        assert right == 0
        return {"scale": named.get("scale"), "window": None if left == -1 else left + 1}


@contextmanager
def flash_on_cpu() -> Iterator[FlashOnCpu]:
    """Make torch's varlen attention run on the CPU, and our attention use it; yields the counted calls."""
    stand_in, before = FlashOnCpu(), sample_attention._available
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", stand_in.forward, "CPU")
    library.impl("_flash_attention_backward", stand_in.backward, "CPU")
    groups = "enable_gqa" in varlen.varlen_attn.__kwdefaults__
    sample_attention._available = AvailableKernels(True, None, varlen.varlen_attn, groups, device_type="cpu")
    try:
        yield stand_in
    finally:
        sample_attention._available = before
        library._destroy()
