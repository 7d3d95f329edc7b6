"""Sequence-parallel attention: each rank computes some heads of every sample in a row (Ulysses, arXiv:2309.14509).

A rank has a slice of the tokens with all heads. One all-to-all of queries, keys and values gives it all tokens of its
share of the heads; a second one returns the output. In between, attention sees the whole row, so windows, soft caps,
sinks and sample boundaries work as on one rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from finetune.errors import StrategyError
from finetune.model.attention.sample_attention import AttentionSettings, QueryKeyValue
from finetune.model.attention.supported_models import PLAIN_MODEL_TYPES, SINK_MODEL_TYPES, text_config
from finetune.runtime.parallel import SequenceGroup, sequence_group, swap_blocks

Attend = Callable[[QueryKeyValue, AttentionSettings], Tensor]
"""Computes the attention of a whole row, [1, tokens, heads, width of the values]."""

SETTING = "parallelism_config_sp_size"
"""The key of the accelerate config that enables it."""

_ROPES_OF_THE_LONGEST = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the largest position, which a slice does not contain."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the collectives cannot be compiled
def attend_slices(qkv: QueryKeyValue, settings: AttentionSettings, attend: Attend) -> Tensor:
    """Return the attention of this rank's slice of a row, [1, tokens of the slice, heads, width]. Collective."""
    group = sequence_group()
    require_divisible_heads(qkv.query.shape[1], group.size)
    if settings.sinks is not None:
        settings = replace(settings, sinks=settings.sinks.chunk(group.size)[group.index])
    output = attend(_tokens_to_heads(qkv, group), settings)
    blocks = output.view(group.size, -1, *output.shape[2:])  # [ranks, tokens of a slice, heads / ranks, width]
    return swap_blocks(blocks).transpose(0, 1).flatten(1, 2).contiguous()[None]


def require_divisible_heads(num_heads: int, size: int) -> None:
    """Raise StrategyError unless `size` divides the number of query heads."""
    if num_heads % size:
        fitting = ", ".join(str(degree) for degree in range(1, num_heads + 1) if num_heads % degree == 0)
        raise StrategyError(
            f"{SETTING}: {size} ranks cannot share {num_heads} attention heads. Degrees that work: {fitting}."
        )


def slicing_problem(config: Any, size: int) -> str | None:
    """Return why a model with this config cannot be computed exactly in slices of a row; None if it can."""
    text = text_config(config)
    model_type, heads = text.model_type, getattr(text, "num_attention_heads", None)
    if model_type not in PLAIN_MODEL_TYPES | SINK_MODEL_TYPES:
        return f"`{model_type}` has, or may have, layers that mix the tokens of a row outside our attention"
    parameters = getattr(text, "rope_parameters", None) or {}
    parts = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]  # of layer types
    rope_types = {str(part["rope_type"]) for part in parts if "rope_type" in part}
    if unsupported := sorted(rope_types & set(_ROPES_OF_THE_LONGEST)):
        return f"the frequencies of `{unsupported[0]}` rotary positions depend on the whole row. Use `yarn` or `linear`"
    if isinstance(heads, int):
        require_divisible_heads(heads, size)
    return None


_TOLERANCE = {"float32": 1e-4, "half": 0.1}
"""Maximum difference from the whole row's logits, relative to the largest logit; by precision."""


def require_equal_logits(whole: Tensor, slices: Tensor, *, config: Any, size: int) -> None:
    """Raise StrategyError unless slices of a row give the same logits as the whole row, [tokens, vocabulary]."""
    scale = whole.float().abs().max().clamp(min=1e-6)
    difference = float(torch.nan_to_num((slices.float() - whole.float()).abs().max() / scale, nan=torch.inf))
    is_exact = difference <= _TOLERANCE["float32" if whole.dtype == torch.float32 else "half"]
    if not is_exact:
        raise StrategyError(
            f"{SETTING}: {size}: `{config.model_type}` gives different logits for slices of a row and for the whole "
            f"row ({difference:.1e} of the largest): a layer mixes tokens outside our attention. Launch without it."
        )


def _tokens_to_heads(qkv: QueryKeyValue, group: SequenceGroup) -> QueryKeyValue:
    """Return all tokens of this rank's heads, [1, heads / ranks, tokens, width]; repeats key heads if too few."""
    times = group.size // gcd(group.size, qkv.key.shape[1])
    if times > 1:
        repeated = (tensor.repeat_interleave(times, dim=1) for tensor in qkv[1:])
        qkv = QueryKeyValue(qkv.query, *repeated)
    if len({tensor.dtype for tensor in qkv}) > 1:
        return QueryKeyValue(*(_whole_rows([tensor], group)[0] for tensor in qkv))
    return QueryKeyValue(*_whole_rows(qkv, group))


def _whole_rows(parts: Any, group: SequenceGroup) -> list[Tensor]:
    """Return tensors [1, heads / ranks, tokens, width] from [1, heads, slice's tokens, width], in one all-to-all."""
    blocks = [part[0].unflatten(0, (group.size, -1)) for part in parts]  # [ranks, heads / ranks, tokens, width]
    swapped = swap_blocks(torch.cat([block.flatten(1) for block in blocks], dim=1))
    rows = torch.split(swapped, [block[0].numel() for block in blocks], dim=1)
    return [row.view(block.shape).transpose(0, 1).flatten(1, 2)[None] for row, block in zip(rows, blocks, strict=True)]
