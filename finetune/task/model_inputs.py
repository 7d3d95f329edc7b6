"""From samples to a language model's inputs: collated with padding or padding-free, and given to the wrapped model."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.sections.data import BatchingSection
from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.features import Features
from finetune.errors import StrategyError
from finetune.registry.attention import PER_SAMPLE_ATTENTION, takes_boundaries
from finetune.runtime.packed_rows import SAMPLE_LENGTHS, SampleLengths


def is_padding_free(batching: BatchingSection) -> bool:
    """Return whether the samples of a forward pass are packed into one row; `auto` has been resolved before."""
    return batching.padding_free is True or batching.by == "packs"


def collate_padded(features: Sequence[Features], *, pad_id: int) -> Batch:
    """Return the samples padded on the right; labels[b, t] is the token at t + 1 where that one is a target."""
    longest = max(each.length for each in features)
    input_ids = np.full((len(features), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros((len(features), longest), dtype=np.int64)
    labels = np.full((len(features), longest), IGNORED, dtype=np.int64)
    for place, each in enumerate(features):
        input_ids[place, : each.length] = each.arrays["input_ids"]
        attention_mask[place, : each.length] = 1
        labels[place, : each.length] = _labels(each)
    targets = Targets.of(labels)
    inputs = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}
    return Batch(
        inputs=inputs,
        labels=torch.from_numpy(labels),
        num_targets=len(targets.labels),
        num_tokens=int(attention_mask.sum()),
        sample_ids=tuple(each.sample_id for each in features),
        targets=targets,
    )


def collate_padding_free(features: Sequence[Features]) -> Batch:
    """Return the samples in one row without padding and without an attention mask.

    Positions start at 0 in every sample and so mark the boundaries. No label is a token of the next sample.
    """
    labels = np.concatenate([_labels(each) for each in features])
    return collate_row(features, {"input_ids": [each.arrays["input_ids"] for each in features]}, token_labels=labels)


def collate_row(
    features: Sequence[Features],
    columns: Mapping[str, Sequence[np.ndarray]],
    *,
    labels: Tensor | None = None,
    token_labels: np.ndarray | None = None,
) -> Batch:
    """Return the samples in one row; `columns` are what the model reads of each, `input_ids` first.

    The labels are those of the samples, or `token_labels`, those of the row's tokens: these are the targets then.
    """
    lengths = [len(each) for each in columns["input_ids"]]
    ends = np.cumsum([0, *lengths])
    inputs = {name: torch.from_numpy(np.concatenate(each, dtype=np.int64))[None] for name, each in columns.items()}
    inputs["position_ids"] = torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], lengths))[None]
    targets = None if token_labels is None else _targets_of_samples(token_labels, ends)
    if token_labels is not None:
        labels = torch.from_numpy(token_labels)[None]
    assert labels is not None, "samples have labels, or their tokens have"
    return Batch(
        inputs=inputs,
        labels=labels,
        num_targets=len(features) if targets is None else len(targets.labels),
        num_tokens=int(ends[-1]),
        sample_ids=tuple(each.sample_id for each in features),
        cumulative_lengths=torch.from_numpy(ends.astype(np.int32)),
        longest=max(lengths),
        lengths=tuple(lengths),
        targets=targets,
    )


def _targets_of_samples(labels: np.ndarray, ends: np.ndarray) -> Targets:
    """Return the targets of a row's labels, counted by sample; `ends` are where samples begin, and the row's end."""
    positions = np.flatnonzero(labels != IGNORED)
    per_sample = np.diff(np.searchsorted(positions, ends))
    return Targets(torch.from_numpy(positions), torch.from_numpy(labels[positions]), tuple(per_sample.tolist()))


def _labels(features: Features) -> np.ndarray:
    """Return the token after each position where it is a target; there is none after the last."""
    ids, is_target = features.arrays["input_ids"], features.arrays["is_target"]
    return np.append(np.where(is_target[1:], ids[1:].astype(np.int64), IGNORED), IGNORED)


def forward_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits as the model gives them, e.g. [batch, length, vocabulary]."""
    logits: Tensor = model(**forward_inputs(model, batch)).logits
    return logits


def forward_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return what the model is given."""
    return {**batch.inputs, **_positions(model, batch), **_boundaries(model, batch), "use_cache": False}


def unwrap_model(model: nn.Module) -> nn.Module:
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
    """Return the boundaries of the samples in a row, named as in transformers; nothing for attention without need.

    Without them flash attention computes them in every layer, with a host-device synchronisation each. Ours is given
    every length, too, and transformers that the mask is made already: it uses none.
    """
    ends, attention = batch.cumulative_lengths, _attention(model)
    if batch.num_slices > 1 and attention != PER_SAMPLE_ATTENTION:
        raise StrategyError(
            f"sequence parallelism needs our attention of whole samples, and this model has `{attention}`. Write "
            "`model.attention: auto`, or launch without parallelism_config_sp_size."
        )
    if ends is None or not takes_boundaries(attention):
        return {}
    longest = batch.longest
    edges = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if attention != PER_SAMPLE_ATTENTION:
        return edges
    no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ends.device)
    return {
        **edges,
        SAMPLE_LENGTHS: SampleLengths(batch.lengths, num_slices=batch.num_slices),
        "attention_mask": no_mask,
    }


def _positions(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the positions of a row as the model counts them, where it does not count from 0 (RoBERTa's relatives).

    Those count the tokens that are no padding from `padding_idx` + 1, and padding is at `padding_idx`.
    """
    body: Any = getattr(unwrap_model(model), "base_model", None)
    embeddings: Any = getattr(body, "embeddings", None)
    if batch.cumulative_lengths is None or not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return {}
    positions, padding_idx = batch.inputs["position_ids"][0], embeddings.padding_idx
    is_text = (batch.inputs["input_ids"][0] != padding_idx).long()
    counted = is_text.cumsum(0)
    firsts = torch.arange(len(positions), device=positions.device) - positions
    before = (counted - is_text)[firsts]  # tokens of earlier samples
    return {"position_ids": ((counted - before) * is_text + padding_idx)[None]}


def _attention(model: nn.Module) -> str | None:
    return getattr(getattr(unwrap_model(model), "config", None), "_attn_implementation", None)


def decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    """Return what an encoder-decoder's decoder reads to predict the labels: the labels, shifted by one.

    A model that shifts labels itself is asked (mBART begins with the language, for example). The others (M2M100, NLLB,
    Blenderbot, SeamlessM4T) shift inside `forward(labels=...)`, which would compute a mean loss, and do it as here.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return cast(Tensor, shift(labels=labels))
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = model.config.decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id)
