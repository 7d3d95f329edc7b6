"""A model's logits for a batch, whatever the model is wrapped in."""

from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.runtime.end_to_end import PER_SAMPLE, SAMPLE_LENGTHS, SampleLengths

TOLD = ("flash_attention_2", "flash_attention_3", PER_SAMPLE)
"""Attention that is told where samples begin; others work it out from the positions."""


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits as the model gives them, e.g. [batch, length, vocabulary]."""
    logits: Tensor = model(**inputs_of(model, batch)).logits
    return logits


def inputs_of(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return what the model is given."""
    return {**batch.inputs, **_boundaries(model, batch), "use_cache": False}


def innermost(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers: DDP, an engine, a compiled module, peft."""
    while True:
        inner: Any = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        unwrap = getattr(model, "get_base_model", None)
        if inner is None and callable(unwrap):
            inner = unwrap()
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _boundaries(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return where the samples of the row begin, in transformers' words; nothing for attention that needs no telling.

    Without them flash attention works them out in every layer, and waits for the device each time. Ours is told of
    every length, too, and transformers that the mask is made already: it uses none.
    """
    ends, attention = batch.cumulative_lengths, _attention(model)
    if ends is None or attention not in TOLD:
        return {}
    longest = batch.longest
    edges = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if attention != PER_SAMPLE:
        return edges
    no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ends.device)
    return {**edges, SAMPLE_LENGTHS: SampleLengths(batch.lengths), "attention_mask": no_mask}


def _attention(model: nn.Module) -> str | None:
    return getattr(getattr(innermost(model), "config", None), "_attn_implementation", None)
