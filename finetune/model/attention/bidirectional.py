"""Bidirectional attention of one sample, and the encoders whose samples may be packed into one row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from finetune.model.attention.causal import (
    MAX_QUERY_BLOCK,
    AttentionSettings,
    QueryKeyValue,
    causal_attention,
    softcapped_attention,
)

PACKING_ENCODER_TYPES = frozenset(
    {
        *("albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "gte"),
        *("jina_embeddings_v3", "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "xlm-roberta"),
        *("ultrabert", "xlm-roberta-xl"),
    }
)
"""Values of `model_type`. Others compute attention in code of their own, or from relative positions of a whole row."""

ENCODER_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def supports_packed_encoders(config: Any) -> bool:
    """Return whether the config is of such an encoder, with transformers' own code, and not used as a decoder."""
    return (
        config.model_type in PACKING_ENCODER_TYPES
        and type(config).__module__.startswith("transformers.models.")
        and ENCODER_LAYER_TYPES.issuperset(getattr(config, "layer_types", None) or ())
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
    )


def is_bidirectional(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether an attention layer attends to both sides, as transformers decides it; `arguments` are its own."""
    is_causal = arguments.get("is_causal")
    return not (getattr(module, "is_causal", True) if is_causal is None else is_causal)


def sample_attention(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return attention within each row of a batch, [batch, length, heads, width], causal or bidirectional."""
    return causal_attention(qkv, settings) if settings.is_causal else bidirectional_attention(qkv, settings)


def bidirectional_attention(qkv: QueryKeyValue, settings: AttentionSettings) -> Tensor:
    """Return attention to both sides; with a window, a query attends to the keys fewer than `window` places away."""
    length, window = qkv.query.shape[2], settings.window
    if window is None or length <= window:
        return _attend(qkv, None, settings)
    outputs = []
    for start, query in _blocks(qkv.query):
        first, last = max(0, start - window + 1), min(length, start + query.shape[2] + window - 1)
        seen = QueryKeyValue(query, *(each.narrow(2, first, last - first) for each in qkv[1:]))
        queries = torch.arange(start, start + query.shape[2], device=query.device)
        keys = torch.arange(first, last, device=query.device)
        outputs.append(_attend(seen, (queries[:, None] - keys).abs() < window, settings))
    return torch.cat(outputs, dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be recompiled for every longest sample
def padded_attention(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    """Return bidirectional attention of the samples of a row, [1, tokens, heads, width], as one padded batch.

    For a GPU without a kernel for such rows: one call, where each sample by itself would be one. `edges` are where
    samples begin, and the row's end.
    """
    starts, places = edges[:-1, None].long(), torch.arange(longest, device=edges.device)
    is_token = places < edges.diff()[:, None]  # [samples, longest]
    index = torch.where(is_token, starts + places, 0)
    batch = QueryKeyValue(*(each[0].transpose(0, 1)[index].transpose(1, 2) for each in qkv))
    mask = is_token[:, None, None]
    if settings.window is not None:
        mask = mask & ((places[:, None] - places).abs() < settings.window)
        mask = mask | ~is_token[:, None, :, None]  # padding attends to all: a row without any key would be NaN
    tokens = torch.arange(qkv.query.shape[2], device=edges.device)
    sample = torch.searchsorted(edges[1:].contiguous(), tokens, right=True)
    return _attend(batch, mask, settings)[sample, tokens - edges[sample]][None]


def _blocks(query: Tensor) -> list[tuple[int, Tensor]]:
    """Return blocks of queries and the place of the first of each: memory grows with length x window."""
    blocks = torch.split(query, MAX_QUERY_BLOCK, dim=2)
    return [(number * MAX_QUERY_BLOCK, block) for number, block in enumerate(blocks)]


def _attend(qkv: QueryKeyValue, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Return attention to the keys where the mask is true, to all without one: [batch, queries, heads, width]."""
    if settings.softcap is not None:
        added = None
        if mask is not None:
            least = torch.finfo(qkv.query.dtype).min
            added = torch.zeros_like(mask, dtype=qkv.query.dtype).masked_fill(~mask, least)
        return softcapped_attention(qkv, added, settings)
    query = qkv.query
    if query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        qkv = qkv.repeated  # no fast kernel supports grouped heads here
    output: Tensor = scaled_dot_product_attention(
        *qkv,
        attn_mask=mask,
        dropout_p=settings.dropout,
        scale=settings.scaling,
        enable_gqa=query.shape[1] != qkv.key.shape[1],
    )
    return output.transpose(1, 2)
