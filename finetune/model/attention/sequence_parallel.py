"""Attention of a row that several ranks share: each computes some heads of every sample (Ulysses, arXiv:2309.14509).

A rank has a slice of the tokens with all heads. One all-to-all of queries, keys and values gives it all tokens with its
share of the heads, a second one brings back the output. In between, attention is that of the whole row: windows, soft
caps, sinks and the borders of samples are what they are on one rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from finetune.errors import StrategyError
from finetune.model.attention.causal import AttentionSettings, QueryKeyValue
from finetune.model.attention.supported_models import PLAIN_MODEL_TYPES, SINK_MODEL_TYPES, text_config
from finetune.runtime.sequence_parallel import SequenceGroup, sequence_group, swap_blocks

Attend = Callable[[QueryKeyValue, AttentionSettings], Tensor]
"""From the whole row's queries, keys and values to its attention, [1, tokens, heads, width of the values]."""

SETTING = "parallelism_config_sp_size"
"""The key of the accelerate config that asks for it."""

_ROPES_OF_THE_LONGEST = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the largest position, which one slice does not know."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing can be compiled across what ranks exchange
def attend_slices(qkv: QueryKeyValue, settings: AttentionSettings, attend: Attend) -> Tensor:
    """Return the attention of this rank's slice of a row, [1, tokens of the slice, heads, width]. Collective."""
    group = sequence_group()
    require_divisible_heads(qkv.query.shape[1], group.size)
    if settings.sinks is not None:
        settings = replace(settings, sinks=settings.sinks.chunk(group.size)[group.place])
    return _heads_to_tokens(attend(_tokens_to_heads(qkv, group), settings), group)


def require_divisible_heads(num_heads: int, size: int) -> None:
    """Raise StrategyError unless ranks can have equally many of the query heads."""
    if num_heads % size:
        fitting = ", ".join(str(each) for each in range(1, num_heads + 1) if num_heads % each == 0)
        raise StrategyError(
            f"{SETTING}: {size} ranks cannot share {num_heads} attention heads. Degrees that work: {fitting}."
        )


def slicing_problem(config: Any, size: int) -> str | None:
    """Return why a model with this config is not computed exactly in slices of a row; None where it is."""
    text = text_config(config)
    kind, heads = text.model_type, getattr(text, "num_attention_heads", None)
    if kind not in PLAIN_MODEL_TYPES | SINK_MODEL_TYPES:
        return f"`{kind}` has layers that mix the tokens of a row outside our attention, or they are not known not to"
    if found := sorted(set(_rope_types(text)) & set(_ROPES_OF_THE_LONGEST)):
        return f"the frequencies of `{found[0]}` rotary positions depend on the whole row. Use `yarn` or `linear`"
    if isinstance(heads, int):
        require_divisible_heads(heads, size)
    return None


_TOLERANCE = {"float32": 1e-4, "half": 0.1}
"""Of the difference to the whole row's logits, relative to the largest; by precision."""


def require_equal_logits(whole: Tensor, slices: Tensor, *, config: Any, size: int) -> None:
    """Raise StrategyError unless slices of a row have the logits of the whole one, both [tokens, vocabulary]."""
    scale = whole.float().abs().max().clamp(min=1e-6)
    difference = float(torch.nan_to_num((slices.float() - whole.float()).abs().max() / scale, nan=torch.inf))
    is_exact = difference <= _TOLERANCE["float32" if whole.dtype == torch.float32 else "half"]
    if not is_exact:
        raise StrategyError(
            f"{SETTING}: {size}: `{config.model_type}` gives other logits for slices of a row than for the whole one "
            f"({difference:.1e} of the largest): a layer mixes tokens outside our attention. Launch without it."
        )


def _rope_types(config: Any) -> list[str]:
    """Return the kinds of rotary positions, of which types of layers may have their own."""
    written = getattr(config, "rope_parameters", None) or {}
    parts = [written, *(each for each in written.values() if isinstance(each, Mapping))]
    return [str(each["rope_type"]) for each in parts if "rope_type" in each]


def _tokens_to_heads(qkv: QueryKeyValue, group: SequenceGroup) -> QueryKeyValue:
    """Return all tokens of this rank's heads, [1, heads / ranks, tokens, width]; key heads are repeated if too few."""
    times = group.size // gcd(group.size, qkv.key.shape[1])
    if times > 1:
        repeated = (each.repeat_interleave(times, dim=1) for each in qkv[1:])
        qkv = QueryKeyValue(qkv.query, *repeated)
    if len({each.dtype for each in qkv}) > 1:
        return QueryKeyValue(*(_whole_rows(each, group)[0] for each in ([one] for one in qkv)))
    return QueryKeyValue(*_whole_rows(qkv, group))


def _whole_rows(parts: Any, group: SequenceGroup) -> list[Tensor]:
    """Return [1, heads / ranks, tokens, width] of each of [1, heads, tokens of the slice, width], in one exchange."""
    blocks = [each[0].unflatten(0, (group.size, -1)) for each in parts]  # [ranks, heads / ranks, tokens, width]
    swapped = swap_blocks(torch.cat([each.flatten(1) for each in blocks], dim=1))
    found = torch.split(swapped, [each[0].numel() for each in blocks], dim=1)
    return [one.view(each.shape).transpose(0, 1).flatten(1, 2)[None] for one, each in zip(found, blocks, strict=True)]


def _heads_to_tokens(output: Tensor, group: SequenceGroup) -> Tensor:
    """Return all heads of this rank's tokens, from all tokens of its heads: [1, tokens, heads, width], contiguous."""
    blocks = output.view(group.size, -1, *output.shape[2:])  # [ranks, tokens of a slice, heads / ranks, width]
    return swap_blocks(blocks).transpose(0, 1).flatten(1, 2).contiguous()[None]
