"""Attention of one sample, causal or bidirectional: scaling, window, dropout and soft cap as its model applies them.

And the variable-length kernels for a whole packed row: flash attention's, else torch's own.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention, softmax
from torch.utils.checkpoint import checkpoint

from finetune.runtime.optional import require

MAX_QUERY_BLOCK = 512
"""Maximum number of queries per block of sliding-window and of soft-capped attention."""

MAX_CAPPED_LENGTH = 2048
"""Longer samples are computed in blocks with soft caps, whose scores are kept otherwise: 4 numbers per pair."""


class QueryKeyValue(NamedTuple):
    """Inputs of an attention layer."""

    query: Tensor  # [batch, heads, length, width]
    key: Tensor  # [batch, key heads, length, width]
    value: Tensor

    @property
    def repeated(self) -> "QueryKeyValue":
        """Return keys and values with one head per query head."""
        times = self.query.shape[1] // self.key.shape[1]
        if times == 1:
            return self
        return QueryKeyValue(
            self.query, self.key.repeat_interleave(times, dim=1), self.value.repeat_interleave(times, dim=1)
        )


@dataclass(frozen=True)
class AttentionSettings:
    """How a layer computes attention from its scores."""

    scaling: float | None = None  # None: 1 / sqrt(width)
    dropout: float = 0.0
    softcap: float | None = None  # c tanh(score / c): Gemma 2
    window: int | None = None  # keys that a query attends to on a side, its own included; None: all
    is_causal: bool = True  # False: a query attends to both sides
    sinks: Tensor | None = None  # [heads]: an additional score per query, whose weight reaches no value (gpt-oss)


def is_bidirectional(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether an attention layer attends to both sides, as transformers decides it; `arguments` are its own."""
    is_causal = arguments.get("is_causal")
    return not (getattr(module, "is_causal", True) if is_causal is None else is_causal)


def sample_attention(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return attention within each row of a batch, [batch, length, heads, width], causal or bidirectional."""
    return causal_attention(qkv, settings) if settings.is_causal else bidirectional_attention(qkv, settings)


def causal_attention(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return causal attention within each row of a batch, [batch, length, heads, width]."""
    query, length = qkv.query, qkv.query.shape[2]
    if settings.softcap is not None:
        window = settings.window or length
        if length <= MAX_CAPPED_LENGTH:
            return _last_queries_capped(qkv, settings, window)
        outputs = []  # the backward pass computes each block again, so that memory grows with the length
        for number, block in enumerate(torch.split(query, MAX_QUERY_BLOCK, dim=2)):
            start, end = number * MAX_QUERY_BLOCK, number * MAX_QUERY_BLOCK + block.shape[2]
            first = max(0, start - window + 1)
            seen = QueryKeyValue(block, *(tensor.narrow(2, first, end - first) for tensor in qkv[1:]))
            outputs.append(checkpoint(_last_queries_capped, seen, settings, window, use_reentrant=False))
        return torch.cat(outputs, dim=1)
    if settings.window is None or length <= settings.window:
        return _causal_with_sinks(qkv, settings) if settings.sinks is not None else _sdpa(qkv, None, settings)
    return _sliding_window_attention(qkv, settings, window=settings.window)


def _last_queries_capped(qkv: QueryKeyValue, settings: AttentionSettings, window: int) -> Tensor:
    """Return causal attention with soft-capped scores of queries of which the last is at the last key."""
    query = qkv.query
    is_seen = _band_mask(query.shape[2], qkv.key.shape[2], back=window, device=query.device)
    added = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill(~is_seen, torch.finfo(query.dtype).min)
    return softcapped_attention(qkv, added, settings)


def softcapped_attention(qkv: QueryKeyValue, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Return attention with soft-capped scores, as transformers' eager attention; `mask` is added to the scores."""
    query, key, value = qkv.repeated
    scaling = _scaling(qkv, settings)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if settings.softcap is not None:
        weights = torch.tanh(weights / settings.softcap) * settings.softcap
    if mask is not None:
        weights = weights + mask
    weights = softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = dropout(weights, p=settings.dropout, training=settings.dropout > 0)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def _sliding_window_attention(qkv: QueryKeyValue, settings: AttentionSettings, *, window: int) -> Tensor:
    """Return sliding-window attention, a block of queries at a time: time and memory grow with length x window."""
    length, rows = qkv.query.shape[2], min(window, MAX_QUERY_BLOCK)
    sizes = [window, *[rows] * ((length - window) // rows)]
    sizes += [length - sum(sizes)] if length > sum(sizes) else []
    outputs, end = [], 0
    bands: dict[tuple[int, int], Tensor] = {}  # blocks of one shape share theirs, which the backward pass keeps
    for query in torch.split(qkv.query, sizes, dim=2):
        start, end = end, end + query.shape[2]
        first = max(0, start - window + 1)
        seen = QueryKeyValue(query, *(tensor.narrow(2, first, end - first) for tensor in qkv[1:]))
        shape = (end - start, end - first)
        if start and shape not in bands:  # 0 where a query attends to a key, as attention converts a boolean mask
            is_seen = _band_mask(*shape, back=window, device=query.device)
            bands[shape] = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill(~is_seen, -torch.inf)
        band = bands[shape] if start else None
        if settings.sinks is None:
            outputs.append(_sdpa(seen, band, settings))
        else:
            whole = band is None
            outputs.append(_causal_with_sinks(seen, settings) if whole else attention_with_sinks(seen, band, settings))
    return torch.cat(outputs, dim=1)


def _causal_with_sinks(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return causal attention with sinks. A dummy query before the first keeps the mask plainly causal."""
    query, key, value = _with_sink_key(qkv, settings)
    before = QueryKeyValue(pad(query, (0, 0, 1, 0)), key, value)
    scaled = replace(settings, scaling=_scaling(qkv, settings))  # for the width of the heads before they are widened
    return _sdpa(before, None, scaled)[:, 1:, :, : qkv.value.shape[-1]]


def attention_with_sinks(qkv: QueryKeyValue, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Return attention with sinks, [batch, length, heads, width]; `mask` is boolean or added to the scores.

    Without a mask it is causal, and the last query is at the last key.
    """
    if mask is None:
        num_queries, num_keys = qkv.query.shape[2], qkv.key.shape[2]
        if num_queries == num_keys:
            return _causal_with_sinks(qkv, settings)
        mask = _band_mask(num_queries, num_keys, back=num_keys, device=qkv.query.device)
    always = pad(mask, (1, 0), value=mask.dtype == torch.bool)  # in scores that are added: 0
    scaled = replace(settings, scaling=_scaling(qkv, settings))
    return _sdpa(_with_sink_key(qkv, settings), always, scaled)[..., : qkv.value.shape[-1]]


_SINK_WIDTH = 8
"""Columns added to every head; kernels need a multiple of 8."""


def _with_sink_key(qkv: QueryKeyValue, settings: AttentionSettings) -> QueryKeyValue:
    """Return wider heads and a first key of value 0 whose score is the sink's for every query."""
    assert settings.sinks is not None
    query, key, value = qkv.repeated
    batch, heads, _, width = query.shape
    marks = pad(query.new_ones(*query.shape[:-1], 1), (0, _SINK_WIDTH - 1))  # the 1 multiplies the sink's score
    query = torch.cat([query, marks], dim=-1)
    score = settings.sinks.to(key.dtype) / _scaling(qkv, settings)
    sink = pad(score[None, :, None, None], (width, _SINK_WIDTH - 1)).expand(batch, heads, 1, -1)
    key = torch.cat([sink, pad(key, (0, _SINK_WIDTH))], dim=2)
    return QueryKeyValue(query, key, pad(value, (0, query.shape[-1] - value.shape[-1], 1, 0)))


def _scaling(qkv: QueryKeyValue, settings: AttentionSettings) -> float:
    return qkv.query.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling


def _band_mask(num_queries: int, num_keys: int, *, back: int, device: torch.device) -> Tensor:
    """Return the mask of a window of `back` keys up to and including the query's own; the last query is at the end."""
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    own = num_keys - num_queries
    return is_seen.tril(own).triu(own - back + 1)


def _sdpa(qkv: QueryKeyValue, mask: Tensor | None, settings: AttentionSettings, *, is_causal: bool = True) -> Tensor:
    """Return attention with the mask, [batch, length, heads, width]; without one, causal or to all keys."""
    query = qkv.query
    if query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        qkv = qkv.repeated  # no fast kernel supports grouped heads here
    output: Tensor = scaled_dot_product_attention(
        *qkv,
        attn_mask=mask,
        dropout_p=settings.dropout,
        is_causal=is_causal and mask is None,
        scale=settings.scaling,
        enable_gqa=query.shape[1] != qkv.key.shape[1],
    )
    return output.transpose(1, 2)


def bidirectional_attention(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return attention to both sides; with a window, a query attends to the keys at a distance below `window`."""
    length, window = qkv.query.shape[2], settings.window
    if window is None or length <= window:
        return _attend(qkv, None, settings)
    outputs = []
    for number, query in enumerate(torch.split(qkv.query, MAX_QUERY_BLOCK, dim=2)):  # memory: length x window
        start = number * MAX_QUERY_BLOCK
        first, last = max(0, start - window + 1), min(length, start + query.shape[2] + window - 1)
        seen = QueryKeyValue(query, *(tensor.narrow(2, first, last - first) for tensor in qkv[1:]))
        queries = torch.arange(start, start + query.shape[2], device=query.device)
        keys = torch.arange(first, last, device=query.device)
        outputs.append(_attend(seen, (queries[:, None] - keys).abs() < window, settings))
    return torch.cat(outputs, dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be recompiled for every longest sample
def padded_attention(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    """Return bidirectional attention of the samples of a row, [1, tokens, heads, width], as one padded batch.

    For a GPU without a kernel for such rows: one call instead of one per sample. `edges` are the starts of the samples
    and the end of the row.
    """
    starts, offsets = edges[:-1, None].long(), torch.arange(longest, device=edges.device)
    is_token = offsets < edges.diff()[:, None]  # [samples, longest]
    index = torch.where(is_token, starts + offsets, 0)
    batch = QueryKeyValue(*(tensor[0].transpose(0, 1)[index].transpose(1, 2) for tensor in qkv))
    mask = is_token[:, None, None]
    if settings.window is not None:
        mask = mask & ((offsets[:, None] - offsets).abs() < settings.window)
        mask = mask | ~is_token[:, None, :, None]  # padding attends to all: a row without any key would be NaN
    tokens = torch.arange(qkv.query.shape[2], device=edges.device)
    sample = torch.searchsorted(edges[1:].contiguous(), tokens, right=True)
    return _attend(batch, mask, settings)[sample, tokens - edges[sample]][None]


def _attend(qkv: QueryKeyValue, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Return attention to the keys where the mask is true, to all without one: [batch, queries, heads, width]."""
    if settings.softcap is not None:
        added = None
        if mask is not None:
            least = torch.finfo(qkv.query.dtype).min
            added = torch.zeros_like(mask, dtype=qkv.query.dtype).masked_fill(~mask, least)
        return softcapped_attention(qkv, added, settings)
    return _sdpa(qkv, mask, settings, is_causal=False)


Kernel = Callable[[QueryKeyValue, Tensor, int, AttentionSettings], Tensor]
"""From queries, keys, values of a row, cumulative sample lengths and the longest one to [1, tokens, heads, width]."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class AvailableKernels:
    """The kernels that this machine has."""

    is_capable: bool = False  # whether the GPU is new enough
    flash: ModuleType | None = None  # the package
    torch_varlen: Callable[..., Tensor] | None = None  # torch's own
    supports_gqa: bool = False  # whether that one groups heads by itself (torch 2.12)
    device_type: str = "cuda"
    is_flash_repeatable: bool = True  # whether the package can be asked for a deterministic backward pass (2.4.1)


_available = AvailableKernels()


def varlen_kernel(qkv: QueryKeyValue, settings: AttentionSettings) -> Kernel | None:
    """Return the kernel for such a row on its device; None where each sample is computed separately."""
    width = qkv.query.shape[-1]
    is_available = _available.is_capable and qkv.query.device.type == _available.device_type
    if not is_available or _attention_dtype(qkv) not in HALF_DTYPES:
        return None
    if width != qkv.value.shape[-1] or width > MAX_HEAD_DIM or settings.sinks is not None:
        return None
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_plain = settings.dropout == 0 and settings.softcap is None and width % 8 == 0
    if _available.flash is not None and (_available.is_flash_repeatable or not is_deterministic):
        return _flash_varlen
    return _torch_varlen if is_plain and _available.torch_varlen is not None else None


def missing_kernel_warning(*, is_half: bool, has_sinks: bool = False, of_flash_alone: str = "") -> str | None:
    """Return a warning if a GPU computes rows sample by sample because a kernel is missing; else None.

    `of_flash_alone`: what the model's attention has that only flash-attn computes, such as soft caps.
    """
    if not torch.cuda.is_available() or not is_half:
        return None  # no such kernel supports float32
    detect_kernels()
    reasons = {
        "this GPU supports no varlen kernel.": not _available.is_capable,
        "no varlen kernel supports attention sinks.": has_sinks,
        f"torch's varlen kernel has no {of_flash_alone}. Install `flash-attn`.": (
            bool(of_flash_alone) and _available.flash is None
        ),
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    return reason and f"attention: packed rows are computed sample by sample: {reason}"


def _flash_varlen(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    assert _available.flash is not None  # checked by varlen_kernel
    repeatable = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}  # torch's asks itself
    output: Tensor = _available.flash.flash_attn_varlen_func(
        *_as_varlen_inputs(qkv),
        edges,
        edges,
        longest,
        longest,
        dropout_p=settings.dropout,
        softmax_scale=settings.scaling,
        causal=settings.is_causal,
        window_size=_window_size(settings),
        softcap=settings.softcap or 0.0,
        **repeatable,
    )
    return output[None]


def _torch_varlen(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    assert _available.torch_varlen is not None  # checked by varlen_kernel
    groups = {"enable_gqa": qkv.query.shape[1] != qkv.key.shape[1]} if _available.supports_gqa else {}
    output: Tensor = _available.torch_varlen(
        *_as_varlen_inputs(qkv if groups else qkv.repeated),
        edges,
        edges,
        longest,
        longest,
        scale=settings.scaling,
        window_size=_window_size(settings, causal_right=0),
        **groups,
    )
    return output[None]


def _window_size(settings: AttentionSettings, *, causal_right: int = -1) -> tuple[int, int]:
    """Return the number of keys to the left and right that a query attends to; -1 is all.

    `causal_right` is the kernel's argument for the right side of causal attention without a window.
    """
    side = -1 if settings.window is None else settings.window - 1
    if not settings.is_causal:
        return side, side
    return side, causal_right if settings.window is None else 0


def _as_varlen_inputs(qkv: QueryKeyValue) -> tuple[Tensor, ...]:
    """Return queries, keys and values as [tokens, heads, width] in the kernel's dtype."""
    dtype = _attention_dtype(qkv)
    return tuple(tensor[0].transpose(0, 1).to(dtype) for tensor in qkv)


def _attention_dtype(qkv: QueryKeyValue) -> torch.dtype:
    """Return the dtype of the attention: norms may leave queries and keys in a wider dtype than the values."""
    device = qkv.query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else qkv.value.dtype


def detect_kernels() -> None:
    """Detect the kernels once: compiled code can neither look for packages nor read signatures."""
    global _available
    if not torch.cuda.is_available():
        return
    kernel = getattr(_import_if_installed("torch.nn.attention.varlen"), "varlen_attn", None)
    known = _parameters(kernel)
    flash = _import_if_installed("flash_attn")
    if not hasattr(flash, "flash_attn_varlen_func"):
        flash = None  # only the folder of another package, such as flash-attn-4's `flash_attn/cute`
    _available = AvailableKernels(
        torch.cuda.get_device_capability() >= MIN_CAPABILITY,
        flash,
        kernel if {"scale", "window_size"} <= known else None,  # torch 2.10 has neither
        supports_gqa="enable_gqa" in known,
        is_flash_repeatable="deterministic" in _parameters(getattr(flash, "flash_attn_varlen_func", None)),
    )


def _parameters(function: Callable[..., Tensor] | None) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters) if function else frozenset()


def _import_if_installed(module: str) -> ModuleType | None:
    """Return the module; None if it is not installed, or was built for another torch."""
    try:
        return require(module, extra="flash", purpose="attention") if find_spec(module) else None
    except ImportError:
        return None
