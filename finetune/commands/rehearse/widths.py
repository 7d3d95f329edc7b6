"""A model's config with fewer layers, narrower ones and fewer experts: same type, switches, ties and ratio of heads.

Only the config's values are changed, and `changed_values` reports every change.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.commands.rehearse.report import Change
from finetune.model.layers import LAYER_COUNTS, shorten_config

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim")
HEADS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_SIZES = ("head_dim", "d_kv", "attention_head_dim", "kv_channels")
INNER = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "hidden_dim",
    "intermediate_size_mlp",
    "mlp_dim",
    "block_ff_dim",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts")
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
"""Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
STATE_SIZES = {"mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16}
STATE_HEADS = (("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"), ("mamba_num_heads", "mamba_head_dim", ""))
"""Keys of state-space layers: number of heads, size of each, product of both."""
LINEAR_ATTENTION = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
PROJECTED = ("out_hidden_size", "projection_dim", "embedding_size", "cross_attention_dim")
"""Keys with the width of another component of the model."""
MAX_HEADS, MAX_EXPERTS, MAX_INNER, MIN_WIDTH = 16, 8, 256, 64
_SMALL_HEAD, _HEAD = 8, 16
MULTIPLE = 32
"""Divisor of the widths: the default size of a block of OFT adapters."""

Values = dict[str, Any]


def rounded_width(size: int) -> int:
    """Return the next multiple of `MULTIPLE`, at least one."""
    return max(1, -(-size // MULTIPLE)) * MULTIPLE


def is_count(value: Any) -> bool:
    """Return whether the value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Yield every value that differs, with its dotted name."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed_values(old, new, f"{prefix}{name}.")
        elif old != new:
            yield Change(f"{prefix}{name}", old, new, "to fit a CPU")


def shrunk_values(values: Values, *, layers: Mapping[str, Sequence[int]], level: int) -> Values:
    """Return the values of a smaller config.

    `layers` has the layers to keep by the dotted name of the part of the config, "" for the whole. Level 0 shrinks all
    known sizes, level 1 keeps the widths, and level 2 only removes layers, for models with unknown dependencies between
    widths.
    """
    small = copy.deepcopy(values)
    widths: dict[int, int] = {}
    for name, part, real in _parts(small, values):
        if level == 0:
            _shrink_widths(part, widths)
        if level <= 1:
            _shrink_inner(part, real)
            # At most eight experts, in the same number of groups; at most half of them are chosen for a token.
            for experts in (key for key in EXPERTS if is_count(part.get(key))):
                limit = max(MAX_EXPERTS, 2 * (part.get("n_group") or 1))
                if part[experts] > limit:
                    part[experts] = limit
                    _limit(part, dict.fromkeys(EXPERTS_PER_TOKEN, limit // 2))
                    if is_count(part.get("topk_group")):
                        _limit(part, {"num_experts_per_tok": part["topk_group"] * 2})
        counts = {part[key] for key in LAYER_COUNTS if is_count(part.get(key))}
        kept = layers.get(name, layers.get("", ()))
        if kept and counts:
            shorten_config(part, kept, lengths=counts)
    for _, part, _ in _parts(small, values):
        projected = (*PROJECTED, "hidden_size") if "embed_dim" in part else PROJECTED
        part |= {key: widths[part[key]] for key in projected if is_count(part.get(key)) and part[key] in widths}
    return small


def _parts(small: Values, values: Values, name: str = "") -> Iterator[tuple[str, Values, Values]]:
    """Yield name, small and real values of the config and of the configs in it (`text_config`), the outer one first."""
    yield name, small, values
    for key, part in small.items():
        if isinstance(part, dict) and key.endswith("_config") and any(own in part for own in (*HIDDEN, *LAYER_COUNTS)):
            yield from _parts(part, values[key], f"{name}.{key}".lstrip("."))


def _first(values: Values, names: Sequence[str]) -> str | None:
    return next((name for name in names if is_count(values.get(name)) and values[name] > 0), None)


def _set_all(part: Values, names: Sequence[str], value: int) -> None:
    part |= {name: value for name in names if is_count(part.get(name))}


def _limit(part: Values, limits: Mapping[str, int]) -> None:
    part |= {name: min(part[name], limit) for name, limit in limits.items() if is_count(part.get(name))}


def _shrink_widths(part: Values, widths: dict[int, int]) -> None:
    """Shrink hidden size and heads; the ratio of query heads to key-value heads is kept if possible."""
    hidden_key = "embed_dim" if is_count(part.get("embed_dim")) else _first(part, HIDDEN)
    heads_key, kv_key, size_key = _first(part, HEADS), _first(part, KV_HEADS), _first(part, HEAD_SIZES)
    if hidden_key is None or isinstance(part.get(heads_key or ""), list):
        return
    hidden = part[hidden_key]
    has_attention = heads_key is not None and "state_size" not in part
    width, head_size = rounded_width(MIN_WIDTH), 0
    if has_attention and heads_key is not None:
        heads = part[heads_key]
        num_kv, num_heads = small_heads(heads, part[kv_key] if kv_key else heads)
        own_size = part[size_key] if size_key else hidden // heads
        head_size = min(_SMALL_HEAD if num_heads > 4 else _HEAD, own_size)
        while num_heads * head_size < MIN_WIDTH or (num_heads * head_size) % MULTIPLE:
            head_size += 4
        width = num_heads * head_size if own_size * heads == hidden else rounded_width(max(MIN_WIDTH, 96))
        if width >= hidden:
            return
        _set_all(part, HEADS, num_heads)
        _set_all(part, KV_HEADS, num_kv)
        if size_key:
            part[size_key] = head_size
        _shrink_rope(part, was=own_size, now=head_size)
    width = min(hidden, width)
    widths.setdefault(hidden, width)
    part |= {name: width for name in HIDDEN if part.get(name) == hidden}
    if has_attention and is_count(part.get("kv_lora_rank")):
        _limit(part, LATENT)
        _set_all(part, ("head_dim",), part["qk_rope_head_dim"])
        _set_all(part, ("qk_head_dim",), part["qk_rope_head_dim"] + part["qk_nope_head_dim"])
        _set_all(part, KV_HEADS, part[_first(part, HEADS) or HEADS[0]])
    _shrink_states(part, hidden=hidden, width=width)


def small_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Return a small number of key-value heads and of query heads.

    >>> small_heads(32, 32), small_heads(32, 8), small_heads(28, 4), small_heads(71, 1)
    ((4, 4), (2, 8), (2, 14), (1, 16))
    """
    if heads == kv_heads:
        return min(heads, 4), min(heads, 4)
    ratio = heads // kv_heads
    small_kv = 2 if kv_heads >= 2 and 2 * ratio <= MAX_HEADS else 1
    return small_kv, small_kv * min(ratio, MAX_HEADS)


def _shrink_rope(part: Values, *, was: int, now: int) -> None:
    """Scale sections and factors of rotary embeddings, which count parts of a head."""
    inner = [part[name] for name in ("rope_scaling", "rope_parameters") if isinstance(part.get(name), dict)]
    for values in (part, *inner):
        for name in ("long_factor", "short_factor"):
            factors = values.get(name)
            if isinstance(factors, list) and factors:
                size = max(len(factors) * now // was, 1)
                values[name] = [factors[index * len(factors) // size] for index in range(size)]
        sections = values.get("mrope_section")
        if isinstance(sections, list) and sections:
            scaled = [max(section * now // was, 1) for section in sections[:-1]]
            values["mrope_section"] = [*scaled, now * sum(sections) // was - sum(scaled)]
    if is_count(part.get("rotary_dim")):
        part["rotary_dim"] = max(part["rotary_dim"] * now // was // 2 * 2, 2)


def _shrink_states(part: Values, *, hidden: int, width: int) -> None:
    """Shrink state-space and linear-attention layers; their inner width stays the same multiple of the hidden size."""
    own_heads = (("num_heads", "head_dim", ""),) if "state_size" in part else ()
    for heads, size, total in STATE_HEADS + own_heads:
        if is_count(part.get(heads)) and is_count(part.get(size)):
            inner = part[heads] * part[size] * width // hidden
            part[size] = min(part[size], _HEAD)
            part[heads] = max(inner // part[size], 1)
            _set_all(part, (total,), part[heads] * part[size])
            for groups in ("mamba_n_groups", "n_groups"):
                if is_count(part.get(groups)):
                    part[groups] = math.gcd(part[groups], part[heads])
    _limit(part, STATE_SIZES)
    for name in ("mamba_dt_rank", "time_step_rank"):
        if is_count(part.get(name)):
            part[name] = math.ceil(part[name] * width / hidden)
    if is_count(part.get("linear_num_key_heads")):
        ratio = part["linear_num_value_heads"] // part["linear_num_key_heads"]
        part |= dict(zip(LINEAR_ATTENTION, (2, 2 * ratio, _SMALL_HEAD, _SMALL_HEAD), strict=True))


def _shrink_inner(part: Values, real: Values) -> None:
    """Keep the ratio of feed-forward to hidden size, and at most 256."""
    hidden = _first(real, HIDDEN)
    if hidden is None:
        return

    def shrunk(size: int) -> int:
        return min(size, rounded_width(min(size * part[hidden] // real[hidden], MAX_INNER)))

    for name in INNER:
        size = part.get(name)
        if is_count(size) and name != hidden:
            part[name] = shrunk(part[name])
        elif isinstance(size, list) and all(map(is_count, size)):
            part[name] = [shrunk(own) for own in size]
