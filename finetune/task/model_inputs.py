"""The inputs of a language model: samples collated with padding or padding-free, and passed to the wrapped model.

For heads that read whole samples, such as a classifier's, the body of the model computes a row of samples without
padding, and its output is passed to the model's own head as a padded batch, so that the head (first token, mean, last
token before the padding) works as usual.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.sections.data import BatchingSection
from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.features import Features
from finetune.errors import StrategyError
from finetune.registry.model_choices import PER_SAMPLE_ATTENTION, takes_boundaries
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths
from finetune.task.upstream import replaced_forward


def is_padding_free(batching: BatchingSection) -> bool:
    """Return whether a microbatch is packed into one row; `padding_free: auto` must be resolved."""
    return batching.padding_free is True or batching.by == "packs"


def collate_padded(features: Sequence[Features], *, pad_id: int) -> Batch:
    """Return the samples padded on the right; labels[b, t] is the token at t + 1 if it is a target."""
    ids = [sample.arrays["input_ids"] for sample in features]
    return padded_batch(features, ids, [_labels(sample) for sample in features], pad_id=pad_id)


def padded_batch(
    features: Sequence[Features], ids: Sequence[np.ndarray], labels: Sequence[np.ndarray], *, pad_id: int
) -> Batch:
    """Return the samples with these input ids and labels, padded on the right."""
    padded_labels = pad_rows(labels, IGNORED)
    targets = Targets.of(padded_labels.numpy())
    mask = pad_rows([np.ones(len(row), np.int64) for row in ids], 0)
    return Batch(
        inputs={"input_ids": pad_rows(ids, pad_id), "attention_mask": mask},
        labels=padded_labels,
        num_targets=len(targets.labels),
        num_tokens=sum(sample.length for sample in features),
        sample_ids=tuple(sample.sample_id for sample in features),
        targets=targets,
    )


def collate_padding_free(features: Sequence[Features]) -> Batch:
    """Return the samples in one row without padding and without an attention mask.

    Positions start at 0 in every sample, which marks the boundaries. No label is a token of the next sample.
    """
    labels = np.concatenate([_labels(sample) for sample in features])
    columns = {"input_ids": [sample.arrays["input_ids"] for sample in features]}
    return collate_row(features, columns, token_labels=labels)


def collate_row(
    features: Sequence[Features],
    columns: Mapping[str, Sequence[np.ndarray]],
    *,
    labels: Tensor | None = None,
    token_labels: np.ndarray | None = None,
) -> Batch:
    """Return the samples in one row; `columns` are the model's input arrays per sample, `input_ids` first.

    Pass `labels` with one label per sample, or `token_labels` with one per token, which then define the targets.
    """
    lengths = [len(ids) for ids in columns["input_ids"]]
    ends = np.cumsum([0, *lengths])
    inputs = {name: torch.from_numpy(np.concatenate(arrays, dtype=np.int64))[None] for name, arrays in columns.items()}
    inputs["position_ids"] = torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], lengths))[None]
    targets = None
    if token_labels is not None:
        labels = torch.from_numpy(token_labels)[None]
        positions = np.flatnonzero(token_labels != IGNORED)
        counts = np.diff(np.searchsorted(positions, ends)).tolist()  # of targets, per sample
        targets = Targets(torch.from_numpy(positions), torch.from_numpy(token_labels[positions]), tuple(counts))
    assert labels is not None, "pass `labels` or `token_labels`"
    return Batch(
        inputs=inputs,
        labels=labels,
        num_targets=len(features) if targets is None else len(targets.labels),
        num_tokens=int(ends[-1]),
        sample_ids=tuple(sample.sample_id for sample in features),
        cumulative_lengths=torch.from_numpy(ends.astype(np.int32)),
        longest=max(lengths),
        lengths=tuple(lengths),
        targets=targets,
    )


def pad_rows(arrays: Sequence[np.ndarray], pad_value: int) -> Tensor:
    """Return the arrays as rows of integers, int64 [rows, longest], padded on the right."""
    rows = np.full((len(arrays), max(map(len, arrays))), pad_value, np.int64)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(rows)


def _labels(features: Features) -> np.ndarray:
    """Return the next token of every position if it is a target, else IGNORED; the last position has none."""
    ids, is_target = features.arrays["input_ids"], features.arrays["is_target"]
    return np.append(np.where(is_target[1:], ids[1:].astype(np.int64), IGNORED), IGNORED)


def forward_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's logits, e.g. [batch, length, vocabulary]."""
    logits: Tensor = model(**forward_inputs(model, batch)).logits
    return logits


def forward_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward."""
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
    """Return the sample boundaries of a row, named as in transformers; empty if the attention does not use them.

    Without them flash attention computes them in every layer, with a host-device synchronization each. `per_sample`
    also receives the sample lengths, and a dummy mask so that transformers does not build one.
    """
    ends, config = batch.cumulative_lengths, getattr(unwrap_model(model), "config", None)
    attention: str | None = getattr(config, "_attn_implementation", None)
    if batch.num_slices > 1 and attention != PER_SAMPLE_ATTENTION:
        raise StrategyError(
            f"sequence parallelism needs `per_sample` attention, and this model has `{attention}`. Write "
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
    """Return the positions of a row for models that do not count from 0 (RoBERTa and derivatives); else empty.

    They count non-padding tokens from `padding_idx` + 1; padding tokens have position `padding_idx`.
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


def decoder_input_ids(model: Any, labels: Tensor) -> Tensor:
    """Return the input ids of an encoder-decoder's decoder: the labels, shifted by one position.

    Uses the model's own shift method if it has one (mBART's starts with the language, for example). Other models
    (M2M100, NLLB, Blenderbot, SeamlessM4T) shift inside `forward(labels=...)`, which would compute a mean loss, in the
    same way as this function.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return cast(Tensor, shift(labels=labels))
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = model.config.decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id)


_INPUTS_OF_BODY = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "past_key_values",
    "cache",  # its name from transformers 5.24 on
)


def sample_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the outputs of a head that reads whole samples, for each sample of a row, [samples, outputs]."""
    inputs = forward_inputs(model, batch)
    inner: Any = unwrap_model(model)
    pad_id = inner.config.get_text_config().pad_token_id or 0
    padded = {
        "input_ids": pad_samples(batch.inputs["input_ids"][0], batch, filled_with=pad_id),
        "attention_mask": _mask(batch).long(),
        "use_cache": False,
    }
    body: Any = inner.base_model
    body_forward = body.forward

    def forward(*_: Any, **padded: Any) -> Any:
        """Return the body's output for the row, as padded samples for the head."""
        others = {name: value for name, value in padded.items() if name not in _INPUTS_OF_BODY}
        output: Any = body_forward(**{**others, **inputs})
        hidden = output.last_hidden_state = pad_samples(output.last_hidden_state[0], batch)
        if hasattr(body, "pooler_activation"):  # ALBERT's pooler is a layer over the first tokens
            output.pooler_output = body.pooler_activation(body.pooler(hidden[:, 0]))
        elif getattr(body, "pooler", None) is not None:
            output.pooler_output = body.pooler(hidden)
        return output

    with replaced_forward(body, forward):
        logits: Tensor = model(**padded).logits
    return logits


def pad_samples(values: Tensor, batch: Batch, *, filled_with: float = 0) -> Tensor:
    """Return the values of a row's tokens, [tokens, ...], padded by sample: [samples, longest, ...]."""
    ends, mask = batch.cumulative_lengths, _mask(batch)
    assert ends is not None, "only an unpadded row is split"
    indices = ends[:-1, None].long() + torch.arange(batch.longest, device=ends.device)
    by_sample = values[torch.where(mask, indices, 0)]
    is_padding = ~mask.view(*mask.shape, *[1] * (values.dim() - 1))
    return by_sample.masked_fill(is_padding, filled_with)


def _mask(batch: Batch) -> Tensor:
    """Return the mask of tokens in the padded samples, [samples, longest]."""
    ends = batch.cumulative_lengths
    assert ends is not None, "only an unpadded row has boundaries"
    return torch.arange(batch.longest, device=ends.device) < ends.diff()[:, None]
