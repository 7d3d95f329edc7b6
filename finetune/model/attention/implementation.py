"""Selects a model's attention implementation, defines `per_sample` for packed samples, and checks sample isolation.

transformers separates packed samples with a mask of quadratic size and computes the masked scores, too. If a row's
sample lengths are given, `per_sample` computes the attention of each sample separately, without a mask. If not (padded
batches, a cache), it calls transformers' own functions. It is used for the model types that are covered by tests; every
model is checked with two tiny forward passes before training.

Where ranks share rows, each computes some heads of every sample in a row (Ulysses, arXiv:2309.14509): one all-to-all of
queries, keys and values gives a rank all tokens of its share of the heads, a second one returns the output. In between,
attention sees the whole row, so windows, soft caps, sinks and sample boundaries work as on one rank.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from finetune.errors import ModelError, StrategyError
from finetune.model.attention.sample_attention import (
    AttentionSettings,
    QueryKeyValue,
    attention_with_sinks,
    detect_kernels,
    is_bidirectional,
    padded_attention,
    sample_attention,
    softcapped_attention,
    varlen_kernel,
)
from finetune.model.attention.supported_models import (
    PLAIN_MODEL_TYPES,
    SINK_MODEL_TYPES,
    carries_state,
    padding_reason,
    text_config,
)
from finetune.model.attention.upstream import patch_row_functions, retune_queries
from finetune.registry.model_choices import ATTENTIONS, PER_SAMPLE_ATTENTION
from finetune.runtime.distributed import RankGroup
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths, sequence_group, swap_blocks


def register_per_sample() -> None:
    """Register our attention in transformers as `per_sample`."""
    detect_kernels()
    AttentionInterface.register(PER_SAMPLE_ATTENTION, per_sample_attention)
    AttentionMaskInterface.register(PER_SAMPLE_ATTENTION, padding_mask)


def padding_mask(**arguments: Any) -> Tensor | None:
    """Return transformers' mask, for batches without sample lengths.

    On a GPU it is created even if no row is padded: checking that would synchronize host and device in every pass.
    """
    rows = arguments.get("attention_mask")
    if rows is not None and rows.device.type != "cpu":
        arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    is_capped = getattr(arguments.get("config"), "attn_logit_softcapping", None) is not None
    mask: Tensor | None = (eager_mask if is_capped else sdpa_mask)(**arguments)
    return mask


def per_sample_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, [batch, length, heads, width]; the signature is transformers' AttentionInterface."""
    sinks, is_causal = others.get("s_aux"), not is_bidirectional(module, others)
    qkv = QueryKeyValue(query, key, value)
    settings = AttentionSettings(scaling, dropout, softcap, sliding_window, is_causal, sinks)
    lengths = others.pop(SAMPLE_LENGTHS, None)
    if lengths is not None and lengths.num_slices > 1:
        return attend_slices(qkv, settings, lambda row, own: _attend_row(module, row, lengths, own, others)), None
    if lengths is not None:
        return _attend_row(module, qkv, lengths, settings, others), None
    if attention_mask is not None and attention_mask.numel() == 1 and query.shape[2] > 1:
        raise ModelError(
            f"model.attention: {type(module).__name__} does not pass sample lengths to its attention. "
            "Write `attention: sdpa`."
        )
    if softcap is not None:
        return softcapped_attention(qkv, attention_mask, settings), None
    if sinks is not None:
        return attention_with_sinks(qkv, attention_mask, settings), None
    output: Tensor
    output, _ = sdpa_attention_forward(module, *qkv, attention_mask, dropout=dropout, scaling=scaling, **others)
    return output, None


def _attend_row(
    module: nn.Module, qkv: QueryKeyValue, lengths: SampleLengths, settings: AttentionSettings, others: dict[str, Any]
) -> Tensor:
    """Return the attention of every sample of a row, [1, tokens, heads, width of the values]."""
    config: Any = getattr(module, "config", None)
    layer_types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    layer_type = None if layer_types is None or layer is None else layer_types[layer]
    chunk: int | None = config.attention_chunk_size if layer_type == "chunked_attention" else None  # Llama 4
    width = qkv.value.shape[-1]
    qkv = qkv._replace(query=retune_queries(module, qkv.query, others.get("cu_seq_lens_q"), lengths))
    if width < qkv.query.shape[-1]:  # latent attention: kernels require equal widths
        qkv = qkv._replace(value=pad(qkv.value, (0, qkv.query.shape[-1] - width)))
    kernel: Callable[..., Tensor] | None = varlen_kernel(qkv, settings)
    if chunk is not None and max(lengths.values) > chunk:
        # Every sample starts a new chunk.
        chunks = [min(chunk, length - start) for length in lengths.values for start in range(0, length, chunk)]
        lengths, kernel = SampleLengths(chunks), None
    if kernel is not None:
        output = kernel(qkv, others["cu_seq_lens_q"], others["max_length_q"], settings)
    elif not settings.is_causal and qkv.query.device.type != "cpu":
        output = padded_attention(qkv, others["cu_seq_lens_q"], others["max_length_q"], settings)
    else:
        output = attend_sample_by_sample(qkv, lengths, settings)
    return output.narrow(-1, 0, width)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop would be recompiled for every row
def attend_sample_by_sample(qkv: QueryKeyValue, lengths: SampleLengths, settings: AttentionSettings) -> Tensor:
    """Return the attention of every sample, [1, tokens, heads, width]; samples of equal length run in one call."""
    sizes = lengths.values
    if len(sizes) == 1:
        return sample_attention(qkv, settings)
    if len(set(sizes)) == 1:
        # from [1, heads, samples * length, width] to [samples, heads, length, width]
        rows = (tensor[0].transpose(0, 1) for tensor in qkv)
        batch = (row.reshape(len(sizes), sizes[0], *row.shape[1:]).transpose(1, 2) for row in rows)
        return sample_attention(QueryKeyValue(*batch), settings).flatten(0, 1)[None]
    # `split` has one backward pass for all parts; slicing would allocate a gradient of the full row for every part
    parts = zip(*(torch.split(tensor, sizes, dim=2) for tensor in qkv), strict=True)
    return torch.cat([sample_attention(QueryKeyValue(*part), settings) for part in parts], dim=1)


def requested_attention(name: str) -> str | None:
    """Return the requested implementation, None for `auto`; raises ModelError if this machine cannot run it."""
    package = ATTENTIONS[name].package
    if package is not None and not torch.cuda.is_available():
        raise ModelError(f"model.attention: `{name}` needs a CUDA GPU, and there is none. Write `sdpa` or `auto`.")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModelError(
            f"model.attention: `{name}` needs the package `{package}`, which is not installed. "
            "Install it for your CUDA version, or write `sdpa` or `auto`."
        )
    return None if name == "auto" else name


def default_attention(config: Any) -> str | None:
    """Return `per_sample` for models that are known to support it, else None for transformers' default."""
    if padding_reason(config) is not None:
        return None
    register_per_sample()
    patch_row_functions(config)
    return PER_SAMPLE_ATTENTION


PackedRow = Sequence[Sequence[int]]
"""The token ids of the samples that are packed into one row."""

_LENGTHS = (5, 7, 4)
_TOLERANCE = {"full": (1e-5, 1e-4), "half": (1e-2, 0.1)}
"""Maximum differences if another sample changes, and between a sample in a row and the sample alone; by precision."""


@torch.no_grad()
def check_isolation(
    logits_of: Callable[[PackedRow], Tensor],
    *,
    config: Any,
    vocabulary_size: int,
    is_half: bool,
    logits_alone: Callable[[Sequence[int]], Tensor] | None = None,
) -> None:
    """Raise ModelError unless every sample of a packed row has the same logits as the sample alone.

    `logits_of` returns [tokens of the row, vocabulary] in evaluation mode, or [samples, outputs] for a head that reads
    whole samples. It runs two tiny forward passes: one row has the same sample in first and third place; in the second
    row all other samples differ. `logits_alone`, if given, runs a third pass with the sample as a batch of one.
    Collective if the functions are.
    """
    middle, sample, last = (_tokens(length, vocabulary_size, salt) for salt, length in enumerate(_LENGTHS))
    other_middle, other_last = (_tokens(length, vocabulary_size, salt=7) for length in (_LENGTHS[0], _LENGTHS[2]))
    rows = [[sample, middle, sample, last], [sample, other_middle, sample, other_last]]
    logits = logits_of(rows[0])
    row, changed = _split_by_sample(logits, rows[0]), _split_by_sample(logits_of(rows[1]), rows[1])
    difference = partial(_difference, scale=logits.float().abs().max())
    max_leak, max_shift = _TOLERANCE["half" if is_half else "full"]
    if any(difference(row[index], changed[index]) > max_leak for index in (0, 2)):
        attention = getattr(config, "_attn_implementation", None)
        raise _isolation_error(config, f"a sample depends on others in its row (model.attention is `{attention}`)")
    if difference(row[0], row[2]) > max_shift:
        raise _isolation_error(
            config, "a sample after another differs from the sample alone: its positions are not reset"
        )
    if logits_alone is not None and difference(logits_alone(sample), row[0]) > max_shift:
        raise _isolation_error(config, "a sample in a row differs from the sample in its own batch")


def require_position_ids(arguments: frozenset[str], *, config: Any) -> None:
    """Raise ModelError for a model without `position_ids`; `arguments` are the parameter names of its forward.

    A purely recurrent model does not need them if its layers receive the sample lengths.
    """
    receives_lengths = getattr(config, "_attn_implementation", None) == PER_SAMPLE_ATTENTION
    if "position_ids" not in arguments and not (receives_lengths and carries_state(config)):
        raise _isolation_error(config, "it has no `position_ids` argument, which separates the samples")


def _tokens(length: int, vocabulary_size: int, salt: int) -> list[int]:
    return [(17 + 31 * salt + 13 * position * (salt + 1)) % vocabulary_size for position in range(length)]


def _split_by_sample(logits: Tensor, samples: PackedRow) -> tuple[Tensor, ...]:
    if len(logits) == len(samples):
        return torch.split(logits, 1)
    edges = accumulate((len(sample) for sample in samples), initial=0)
    return tuple(logits[start:stop] for start, stop in pairwise(edges))


def _difference(one: Tensor, other: Tensor, *, scale: Tensor) -> float:
    """Return the largest difference relative to `scale`, the row's largest logit; infinite if a value is not finite.

    The sample's own logits are not used as the scale: a classifier has few, and all may be near zero.
    """
    difference = (one.float() - other.float()).abs().max() / scale.clamp(min=1e-6)
    return float(torch.nan_to_num(difference, nan=torch.inf))


def _isolation_error(config: Any, reason: str) -> ModelError:
    layer_types = sorted({str(layer_type) for layer_type in getattr(config, "layer_types", None) or ()})
    layers = f" (layers: {', '.join(layer_types)})" if layer_types else ""
    return ModelError(
        f"data.batching: `{config.model_type}`{layers} does not support packed samples: {reason}. "
        "Pad them instead: write `by: tokens`, or `by: samples`, and no `padding_free`."
    )


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
    # All tokens of this rank's heads, [1, heads / ranks, tokens, width]; key heads are repeated if there are too few.
    times = group.size // gcd(group.size, qkv.key.shape[1])
    if times > 1:
        qkv = QueryKeyValue(qkv.query, *(tensor.repeat_interleave(times, dim=1) for tensor in qkv[1:]))
    if len({tensor.dtype for tensor in qkv}) > 1:
        rows = [_whole_rows([tensor], group)[0] for tensor in qkv]
    else:
        rows = _whole_rows(qkv, group)
    output = attend(QueryKeyValue(*rows), settings)
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


_SLICE_TOLERANCE = {"float32": 1e-4, "half": 0.1}
"""Maximum difference from the whole row's logits, relative to the largest logit; by precision."""


def require_equal_logits(whole: Tensor, slices: Tensor, *, config: Any, size: int) -> None:
    """Raise StrategyError unless slices of a row give the same logits as the whole row, [tokens, vocabulary]."""
    difference = _difference(slices, whole, scale=whole.float().abs().max())
    if difference > _SLICE_TOLERANCE["float32" if whole.dtype == torch.float32 else "half"]:
        raise StrategyError(
            f"{SETTING}: {size}: `{config.model_type}` gives different logits for slices of a row and for the whole "
            f"row ({difference:.1e} of the largest): a layer mixes tokens outside our attention. Launch without it."
        )


def _whole_rows(parts: Any, group: RankGroup) -> list[Tensor]:
    """Return tensors [1, heads / ranks, tokens, width] from [1, heads, slice's tokens, width], in one all-to-all."""
    blocks = [part[0].unflatten(0, (group.size, -1)) for part in parts]  # [ranks, heads / ranks, tokens, width]
    swapped = swap_blocks(torch.cat([block.flatten(1) for block in blocks], dim=1))
    rows = torch.split(swapped, [block[0].numel() for block in blocks], dim=1)
    return [row.view(block.shape).transpose(0, 1).flatten(1, 2)[None] for row, block in zip(rows, blocks, strict=True)]
