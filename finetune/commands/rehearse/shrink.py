"""A model's config made small: the same type, kinds of layers, switches, ties and head ratio; fewer, narrower layers.

Everything is done on the config's values, and `changed_values` compares before and after: nothing shrinks in silence.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.commands.rehearse.layers import is_count

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim")
HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_SIZE = ("head_dim", "d_kv", "attention_head_dim", "kv_channels")
INNER = (
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "hidden_dim"),
    *("intermediate_size_mlp", "mlp_dim", "block_ff_dim"),
)
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"),
    *("num_decoder_layers",),
)
LAYER_VALUES = "per_layer_config"
"""Values of single layers in the place of those of all, by the layers' numbers."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts")
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
"""Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
STATE_SIZES = {"mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16}
MAX_HEADS, MAX_EXPERTS, MIN_WIDTH = 16, 8, 64
_SMALL_HEAD, _HEAD, _ROUND = 8, 16, 16

Values = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What the job asks of the small model: a least width, and what widths are multiples of."""

    min_width: int = MIN_WIDTH
    multiple_of: int = _ROUND


@dataclass(frozen=True)
class Change:
    """One value that is another in the rehearsal, and why."""

    key: str
    was: Any
    now: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.was)} -> {shown(self.now)} ({self.why})"


def shown(value: Any) -> str:
    """Return the value on one line, cut where it is long."""
    text = "unset" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def shrunk_values(values: Values, *, keep: Mapping[str, Sequence[int]], level: int, sizes: Sizes) -> Values:
    """Return the values of a config, made small.

    `keep`: which layers are kept, by the dotted name of the part of the config ("" for the whole). Level 0 shrinks all
    that is known, 1 keeps the widths, 2 only takes layers away: for models whose widths depend on each other in ways
    that are not known here.
    """
    small = copy.deepcopy(values)
    widths: dict[int, int] = {}
    for place, part in _parts(small):
        if level == 0:
            _shrink_widths(part, widths, sizes)
        if level <= 1:
            _shrink_inner(part, values=_at(values, place), sizes=sizes)
            _shrink_experts(part)
        _keep_layers(part, layers=keep.get(place, keep.get("", ())))
    for place, part in _parts(small):
        _match_widths(part, widths)
        _keep_layer_values(part, was=_at(values, place), layers=keep.get(place, keep.get("", ())))
    return small


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Yield every value that differs, with its dotted name."""
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if isinstance(one, dict) and isinstance(other, dict) and name != LAYER_VALUES:
            yield from changed_values(one, other, f"{prefix}{name}.")
        elif one != other:
            yield Change(f"{prefix}{name}", one, other, "to fit a CPU")


def _parts(values: Values, place: str = "") -> Iterator[tuple[str, Values]]:
    """Yield the config and the configs in it (`text_config`), the outer one first."""
    yield place, values
    for name, part in values.items():
        if isinstance(part, dict) and name.endswith("_config") and any(each in part for each in (*HIDDEN, *LAYERS)):
            yield from _parts(part, f"{place}.{name}".lstrip("."))


def _at(values: Values, place: str) -> Values:
    for name in place.split(".") if place else ():
        values = values[name]
    return values


def _first(values: Values, names: Sequence[str]) -> str | None:
    return next((name for name in names if is_count(values.get(name)) and values[name] > 0), None)


def _shrink_widths(part: Values, widths: dict[int, int], sizes: Sizes) -> None:
    """Make the hidden size and the heads small; the ratio of query heads to key-value heads is kept where it can be."""
    hidden_key = "embed_dim" if is_count(part.get("embed_dim")) else _first(part, HIDDEN)
    heads_key, kv_key, size_key = _first(part, HEADS), _first(part, KV_HEADS), _first(part, HEAD_SIZE)
    if hidden_key is None or isinstance(part.get(heads_key or ""), list):
        return
    hidden = part[hidden_key]
    if heads_key is None or "state_size" in part:  # a model without attention
        _set_width(part, hidden_key, min(hidden, _rounded(sizes.min_width, sizes.multiple_of)), widths)
        _shrink_states(part, hidden=hidden)
        return
    heads, kv_heads = part[heads_key], part[kv_key] if kv_key else part[heads_key]
    small_kv, small_heads = _small_heads(heads, kv_heads)
    head_size = _SMALL_HEAD if small_heads > 4 else _HEAD
    own_size = part[size_key] if size_key else hidden // heads
    head_size = min(head_size, own_size)
    while small_heads * head_size < sizes.min_width or (small_heads * head_size) % sizes.multiple_of:
        head_size += 2 if sizes.multiple_of % 4 else 4
    is_coupled = own_size * heads == hidden
    width = small_heads * head_size if is_coupled else _rounded(max(sizes.min_width, 96), sizes.multiple_of)
    if width >= hidden:
        return
    for key in (each for each in HEADS if is_count(part.get(each))):
        part[key] = small_heads
    for key in (each for each in KV_HEADS if is_count(part.get(each))):
        part[key] = small_kv
    if size_key:
        part[size_key] = head_size
    _set_width(part, hidden_key, width, widths)
    _shrink_rope(part, was=own_size, now=head_size)
    _shrink_latent(part)
    _shrink_states(part, hidden=hidden)


def _small_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Return the numbers of key-value heads and of query heads.

    >>> _small_heads(32, 32), _small_heads(32, 8), _small_heads(28, 4), _small_heads(71, 1)
    ((4, 4), (2, 8), (2, 14), (1, 16))
    """
    if heads == kv_heads:
        return min(heads, 4), min(heads, 4)
    ratio = heads // kv_heads
    small_kv = min(kv_heads, 2)
    while small_kv > 1 and small_kv * ratio > MAX_HEADS:
        small_kv -= 1
    return small_kv, small_kv * min(ratio, MAX_HEADS)


def _set_width(part: Values, key: str, width: int, widths: dict[int, int]) -> None:
    widths.setdefault(part[key], width)
    same = part[key]
    for name in HIDDEN:
        if part.get(name) == same:
            part[name] = width


def _shrink_rope(part: Values, *, was: int, now: int) -> None:
    """Scale what counts parts of a head: sections and factors of rotary embeddings, also one level down."""
    for inner in (
        part,
        *(part[name] for name in ("rope_scaling", "rope_parameters") if isinstance(part.get(name), dict)),
    ):
        for name in ("long_factor", "short_factor"):
            factors = inner.get(name)
            if isinstance(factors, list) and factors:
                size = max(len(factors) * now // was, 1)
                inner[name] = [factors[place * len(factors) // size] for place in range(size)]
        sections = inner.get("mrope_section")
        if isinstance(sections, list) and sections:
            scaled = [max(each * now // was, 1) for each in sections]
            inner["mrope_section"] = [*scaled[:-1], now * sum(sections) // was - sum(scaled[:-1])]
    if is_count(part.get("rotary_dim")):
        part["rotary_dim"] = max(part["rotary_dim"] * now // was // 2 * 2, 2)


def _shrink_latent(part: Values) -> None:
    if not is_count(part.get("kv_lora_rank")):
        return
    for name, size in LATENT.items():
        if is_count(part.get(name)):
            part[name] = min(part[name], size)
    for name in ("head_dim", "qk_head_dim"):
        if is_count(part.get(name)):
            part[name] = part["qk_rope_head_dim"] + (part["qk_nope_head_dim"] if name == "qk_head_dim" else 0)
    for name in KV_HEADS:
        if is_count(part.get(name)):
            part[name] = part[_first(part, HEADS) or name]


def _shrink_states(part: Values, *, hidden: int) -> None:
    """Make state-space and linear-attention layers small; their inner width stays the same multiple of the hidden."""
    width = part[_first(part, HIDDEN) or "hidden_size"]
    for heads, size, total in (
        *(("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"), ("mamba_num_heads", "mamba_head_dim", "")),
        *(("num_heads", "head_dim", "") for _ in range("state_size" in part)),
    ):
        if is_count(part.get(heads)) and is_count(part.get(size)):
            inner = part[heads] * part[size] * width // hidden
            part[size] = min(part[size], _HEAD)
            part[heads] = max(inner // part[size], 1)
            if is_count(part.get(total)):
                part[total] = part[heads] * part[size]
            for groups in ("mamba_n_groups", "n_groups"):
                if is_count(part.get(groups)):
                    part[groups] = math.gcd(part[groups], part[heads])
    for name, most in STATE_SIZES.items():
        if is_count(part.get(name)):
            part[name] = min(part[name], most)
    for name in ("mamba_dt_rank", "time_step_rank"):
        if is_count(part.get(name)):
            part[name] = math.ceil(part[name] * width / hidden)
    if is_count(part.get("linear_num_key_heads")):
        ratio = part["linear_num_value_heads"] // part["linear_num_key_heads"]
        part |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
        part |= {"linear_key_head_dim": _SMALL_HEAD, "linear_value_head_dim": _SMALL_HEAD}


def _shrink_inner(part: Values, *, values: Values, sizes: Sizes) -> None:
    """Make the feed-forward layers as wide, compared with the hidden size, as they were, and at most 256."""
    hidden = _first(values, HIDDEN)
    if hidden is None:
        return
    shrink: Callable[[int], int] = lambda size: min(  # noqa: E731
        size, max(_rounded(min(size * part[hidden] // values[hidden], 256), sizes.multiple_of), sizes.multiple_of)
    )
    for name in INNER:
        if name in part and name != hidden:
            size = part[name]
            if is_count(size):
                part[name] = shrink(size)
            elif isinstance(size, list) and all(map(is_count, size)):
                part[name] = [shrink(each) for each in size]


def _shrink_experts(part: Values) -> None:
    """Keep at most eight experts, in as many groups; no more than half of them are chosen."""
    for name in (each for each in EXPERTS if is_count(part.get(each))):
        most = max(MAX_EXPERTS, 2 * (part.get("n_group") or 1))
        if part[name] > most:
            part[name] = most
            for chosen in (each for each in CHOSEN if is_count(part.get(each))):
                part[chosen] = min(part[chosen], most // 2)
            if is_count(part.get("topk_group")) and is_count(part.get("num_experts_per_tok")):
                part["num_experts_per_tok"] = min(part["num_experts_per_tok"], part["topk_group"] * 2)


def _keep_layers(part: Values, *, layers: Sequence[int]) -> None:
    """Keep these layers in the counts, in lists with a value for each layer, and in lists of layers' numbers."""
    counts = {part[name] for name in LAYERS if is_count(part.get(name))}
    if not layers or not counts:
        return
    for name, value in list(part.items()):
        if name in LAYERS and is_count(value):
            part[name] = min(value, len(layers))
        elif isinstance(value, list) and len(value) in counts and len(value) > len(layers):
            part[name] = [value[index] for index in layers]
        elif isinstance(value, str) and name == "hybrid_override_pattern":
            part[name] = "".join(value[index] for index in layers)
        elif name.endswith(("_indexes", "_indices", "_only_layers")) and isinstance(value, list):
            part[name] = _mapped_numbers(
                value, num_layers=max(counts), layers=layers, is_filter=name.endswith("_only_layers")
            )
    if isinstance(part.get("attention_types"), list):  # gpt_neo: kinds, and how often they are repeated
        part["attention_types"] = [
            [kinds, max(len(layers) // len(kinds), 1)] for kinds, _ in part["attention_types"][:1]
        ]


def _keep_layer_values(part: Values, *, was: Values, layers: Sequence[int]) -> None:
    """Keep the values of single layers for those that are kept, each smaller as the value for all layers is."""
    if not layers or not isinstance(part.get(LAYER_VALUES), dict):
        return
    kept = {layers.index(int(each)): dict(own) for each, own in part[LAYER_VALUES].items() if int(each) in layers}
    for own in kept.values():
        for name, value in own.items():
            if is_count(value) and is_count(part.get(name)) and was[name] > part[name]:
                own[name] = max(value * part[name] // was[name], 1)
    part[LAYER_VALUES] = kept


def _mapped_numbers(numbers: list[Any], *, num_layers: int, layers: Sequence[int], is_filter: bool) -> list[Any]:
    if is_filter:
        return [layers.index(each) for each in numbers if each in layers]
    return sorted({each if each < 0 else each * len(layers) // num_layers for each in numbers})


def _match_widths(part: Values, widths: Mapping[int, int]) -> None:
    """Give projections between parts the new width of what they project to."""
    for name in ("out_hidden_size", "projection_dim", "embedding_size", "cross_attention_dim", "hidden_size"):
        if is_count(part.get(name)) and part[name] in widths and (name != "hidden_size" or "embed_dim" in part):
            part[name] = widths[part[name]]


def _rounded(size: int, multiple: int) -> int:
    return max(multiple, (size + multiple - 1) // multiple * multiple)
