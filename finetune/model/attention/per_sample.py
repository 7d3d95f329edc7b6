"""Attention within each sample of a row: no mask over the whole row is ever made.

transformers' own attention keeps the samples of a row apart by a mask of its length squared, and computes what the mask
throws away. Where a row's sample lengths are given, each sample is computed alone here; where none are given (padded
batches, a cache), transformers' own functions are called, and what they return is returned.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from finetune.errors import ModelError
from finetune.model.attention.kernels import find_kernels, row_kernel
from finetune.model.attention.scores import Heads, Scores, capped, causal
from finetune.runtime.end_to_end import PER_SAMPLE, SAMPLE_LENGTHS, SampleLengths


def register() -> None:
    """Let transformers know our attention as `per_sample`."""
    find_kernels()
    AttentionInterface.register(PER_SAMPLE, attend)
    AttentionMaskInterface.register(PER_SAMPLE, mask_of)


def mask_of(**arguments: Any) -> Tensor | None:
    """Return the mask that transformers makes where no sample lengths are given."""
    is_capped = getattr(arguments.get("config"), "attn_logit_softcapping", None) is not None
    mask: Tensor | None = (eager_mask if is_capped else sdpa_mask)(**arguments)
    return mask


def attend(
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
    heads, scores = Heads(query, key, value), Scores(scaling, dropout, softcap, sliding_window)
    lengths = others.pop(SAMPLE_LENGTHS, None)
    if lengths is not None:
        kernel = row_kernel(heads, scores)
        if kernel is not None:
            return kernel(heads, others["cu_seq_lens_q"], others["max_length_q"], scores), None
        return each_sample(heads, lengths, scores), None
    if attention_mask is not None and attention_mask.numel() == 1 and query.shape[2] > 1:
        raise ModelError(
            f"model.attention: {type(module).__name__} hands no lengths of samples on to its attention. "
            "Write `attention: sdpa`."
        )
    if softcap is not None:
        return capped(heads, attention_mask, scores), None
    output: Tensor
    output, _ = sdpa_attention_forward(module, *heads, attention_mask, dropout=dropout, scaling=scaling, **others)
    return output, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop would be compiled anew for every row
def each_sample(heads: Heads, lengths: SampleLengths, scores: Scores) -> Tensor:
    """Return the output sample by sample, [1, tokens, heads, width]; samples of one length in one call."""
    sizes = lengths.values
    if len(sizes) == 1:
        return causal(heads, scores)
    if len(set(sizes)) == 1:
        batch = Heads(*(_folded(each, num=len(sizes)) for each in heads))
        return causal(batch, scores).flatten(0, 1)[None]
    # `split` has one backward pass for all parts; a slice's would fill the whole row for each of them
    parts = zip(*(torch.split(each, sizes, dim=2) for each in heads), strict=True)
    return torch.cat([causal(Heads(*part), scores) for part in parts], dim=1)


def _folded(row: Tensor, *, num: int) -> Tensor:
    """Return samples of one length as a batch: from [1, heads, num * length, width] to [num, heads, length, width]."""
    _, heads, tokens, width = row.shape
    return row[0].transpose(0, 1).reshape(num, tokens // num, heads, width).transpose(1, 2)
