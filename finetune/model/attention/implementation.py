"""Which attention implementation a model gets; ours for packed samples, `per_sample`.

And the check that it isolates them.

transformers separates packed samples with a mask of the row's length squared and computes what the mask throws away.
Where a row's sample lengths are given, `per_sample` computes each sample alone, without a mask over the row. Where
none are given (padded batches, a cache), it calls transformers' own functions and returns what they return. It is
used for the model types for which tests show it; any model is checked with two tiny forward passes before it
trains.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from finetune.errors import ModelError
from finetune.model.attention.bidirectional import is_bidirectional, padded_attention, sample_attention
from finetune.model.attention.causal import (
    AttentionSettings,
    QueryKeyValue,
    attention_with_sinks,
    softcapped_attention,
)
from finetune.model.attention.sequence_parallel import attend_slices
from finetune.model.attention.supported_models import carries_state, supports_packed_samples
from finetune.model.attention.upstream import patch_row_functions, retune_queries
from finetune.model.attention.varlen_kernels import detect_kernels, varlen_kernel
from finetune.registry.attention import ATTENTIONS, PER_SAMPLE_ATTENTION
from finetune.runtime.packed_rows import SAMPLE_LENGTHS, SampleLengths


def register_per_sample() -> None:
    """Register our attention in transformers as `per_sample`."""
    detect_kernels()
    AttentionInterface.register(PER_SAMPLE_ATTENTION, per_sample_attention)
    AttentionMaskInterface.register(PER_SAMPLE_ATTENTION, padding_mask)


def padding_mask(**arguments: Any) -> Tensor | None:
    """Return transformers' mask, for batches without sample lengths."""
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
    """Return the attention's output, [batch, length, heads, width]; the interface is transformers'."""
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
    """Return the attention of each sample of a row, [1, tokens, heads, width of the values]."""
    chunk, width = _chunk_size(module), qkv.value.shape[-1]
    qkv = qkv._replace(query=retune_queries(module, qkv.query, others.get("cu_seq_lens_q"), lengths))
    if width < qkv.query.shape[-1]:  # latent attention: kernels want one width
        qkv = qkv._replace(value=pad(qkv.value, (0, qkv.query.shape[-1] - width)))
    kernel: Callable[..., Tensor] | None = varlen_kernel(qkv, settings)
    if chunk is not None and max(lengths.values) > chunk:
        lengths, kernel = _in_chunks(lengths, chunk), None
    if kernel is not None:
        output = kernel(qkv, others["cu_seq_lens_q"], others["max_length_q"], settings)
    elif not settings.is_causal and qkv.query.device.type != "cpu":
        output = padded_attention(qkv, others["cu_seq_lens_q"], others["max_length_q"], settings)
    else:
        output = attend_sample_by_sample(qkv, lengths, settings)
    return output.narrow(-1, 0, width)


def _in_chunks(lengths: SampleLengths, size: int) -> SampleLengths:
    """Return the lengths of chunks of at most this size, which restart with each sample."""
    return SampleLengths([min(size, each - start) for each in lengths.values for start in range(0, each, size)])


def _chunk_size(module: nn.Module) -> int | None:
    """Return how many tokens a chunk has in a layer of chunked attention (Llama 4); None in other layers."""
    config: Any = getattr(module, "config", None)
    kinds, place = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None or place is None or kinds[place] != "chunked_attention":
        return None
    size: int = config.attention_chunk_size
    return size


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop would be recompiled for every row
def attend_sample_by_sample(qkv: QueryKeyValue, lengths: SampleLengths, settings: AttentionSettings) -> Tensor:
    """Return the attention of each sample, [1, tokens, heads, width]; samples of equal length in one call."""
    sizes = lengths.values
    if len(sizes) == 1:
        return sample_attention(qkv, settings)
    if len(set(sizes)) == 1:
        batch = QueryKeyValue(*(_row_as_batch(each, num=len(sizes)) for each in qkv))
        return sample_attention(batch, settings).flatten(0, 1)[None]
    # `split` has one backward pass for all parts; a slice's would fill the whole row for each of them
    parts = zip(*(torch.split(each, sizes, dim=2) for each in qkv), strict=True)
    return torch.cat([sample_attention(QueryKeyValue(*part), settings) for part in parts], dim=1)


def _row_as_batch(row: Tensor, *, num: int) -> Tensor:
    """Return equally long samples as a batch: from [1, heads, num * length, width] to [num, heads, length, width]."""
    _, heads, tokens, width = row.shape
    return row[0].transpose(0, 1).reshape(num, tokens // num, heads, width).transpose(1, 2)


def requested_attention(name: str) -> str | None:
    """Return the requested implementation, None for `auto`; raises ModelError if it cannot run here."""
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
    """Return `per_sample` for models that are known to support it, else None: transformers' default."""
    if not supports_packed_samples(config):
        return None
    register_per_sample()
    patch_row_functions(config)
    return PER_SAMPLE_ATTENTION


PackedRow = Sequence[Sequence[int]]
"""The token ids of samples that are packed into one row."""

_LENGTHS = (5, 7, 4)
_TOLERANCE = {"full": (1e-5, 1e-4), "half": (1e-2, 0.1)}
"""Tolerance if another sample changes, and of a sample in a row against the same sample alone; by precision."""


@torch.no_grad()
def check_isolation(
    logits_of: Callable[[PackedRow], Tensor],
    *,
    config: Any,
    vocabulary_size: int,
    is_half: bool,
    logits_alone: Callable[[Sequence[int]], Tensor] | None = None,
) -> None:
    """Raise ModelError unless each sample of a packed row has the same logits as alone.

    `logits_of` returns [tokens of the row, vocabulary] in evaluation mode, or [samples, outputs] of a head that reads
    whole samples. Two tiny forward passes: a sample is first and third in a row, then all others in the row change. A
    third one is the sample in a batch of its own, `logits_alone`, where given. Collective if these are.
    """
    middle, sample, last = (_tokens(length, vocabulary_size, salt) for salt, length in enumerate(_LENGTHS))
    other_middle, other_last = (_tokens(length, vocabulary_size, salt=7) for length in (_LENGTHS[0], _LENGTHS[2]))
    rows = [[sample, middle, sample, last], [sample, other_middle, sample, other_last]]
    logits = logits_of(rows[0])
    row, changed = _split_by_sample(logits, rows[0]), _split_by_sample(logits_of(rows[1]), rows[1])
    difference = partial(_difference, scale=logits.float().abs().max())
    seen, misplaced = _TOLERANCE["half" if is_half else "full"]
    if any(difference(row[place], changed[place]) > seen for place in (0, 2)):
        attention = getattr(config, "_attn_implementation", None)
        raise _isolation_error(config, f"a sample depends on others in its row (model.attention is `{attention}`)")
    if difference(row[0], row[2]) > misplaced:
        raise _isolation_error(
            config, "a sample after another differs from the sample alone: its positions are not reset"
        )
    if logits_alone is not None and difference(logits_alone(sample), row[0]) > misplaced:
        raise _isolation_error(config, "a sample in a row differs from the sample in a batch of its own")


def require_position_ids(arguments: frozenset[str], *, config: Any) -> None:
    """Raise ModelError for a model without `position_ids`; `arguments` are those of its forward.

    A model of recurrent layers alone needs none where its layers get the lengths.
    """
    if "position_ids" not in arguments and not (receives_lengths(config) and carries_state(config)):
        raise _isolation_error(config, "it has no `position_ids` argument, which separates the samples")


def receives_lengths(config: Any) -> bool:
    """Return whether the model was built with our attention, so that its forward is given sample lengths."""
    return getattr(config, "_attn_implementation", None) == PER_SAMPLE_ATTENTION


def _tokens(length: int, vocabulary_size: int, salt: int) -> list[int]:
    return [(17 + 31 * salt + 13 * place * (salt + 1)) % vocabulary_size for place in range(length)]


def _split_by_sample(logits: Tensor, samples: PackedRow) -> tuple[Tensor, ...]:
    if len(logits) == len(samples):
        return torch.split(logits, 1)
    edges = accumulate((len(each) for each in samples), initial=0)
    return tuple(logits[start:stop] for start, stop in pairwise(edges))


def _difference(one: Tensor, other: Tensor, *, scale: Tensor) -> float:
    """Return the largest difference relative to `scale`, a row's largest logit; infinite if a number is not finite.

    Not to the sample's own: a classifier has few, which may all be near zero.
    """
    difference = (one.float() - other.float()).abs().max() / scale.clamp(min=1e-6)
    return float(torch.nan_to_num(difference, nan=torch.inf))


def _isolation_error(config: Any, reason: str) -> ModelError:
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()})
    layers = f" (layers: {', '.join(kinds)})" if kinds else ""
    return ModelError(
        f"data.batching: `{config.model_type}`{layers} does not support packed samples: {reason}. "
        "Pad them instead: write `by: tokens`, or `by: samples`, and no `padding_free`."
    )
