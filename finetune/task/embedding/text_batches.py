"""Samples of several texts as padded batches, and pooled vectors of their sequences."""

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.encoding.text_groups import SCORE
from finetune.data.features import Features
from finetune.data.token_cache.lengths import sequence_bounds
from finetune.task.classification.classes import TextPadding
from finetune.task.model_inputs import forward_inputs

Pooling = Literal["mean", "cls", "last_token"]

_TEXT_ID_BITS = 52
"""Bits of a text's digest: the number that a float64 represents exactly."""


def split_sequences(features: Features) -> list[Features]:
    """Return the sequences of a sample with their model inputs."""
    names = [name for name in ("input_ids", "token_type_ids") if name in features.arrays]
    return [
        Features({name: features.arrays[name][start:end] for name in names}, features.sample_id)
        for start, end in sequence_bounds(features)
    ]


def collate_groups(features: Sequence[Features], padding: TextPadding) -> Batch:
    """Return all first sequences, then all second ones, then the others sample by sample, padded on the right.

    `group_sizes` are the numbers of sequences per sample, `text_ids` the digests of the sequences. A sample is one
    target; its label is its score, if samples have scores.
    """
    groups = [split_sequences(sample) for sample in features]
    firsts, seconds = [group[0] for group in groups], [group[1] for group in groups if len(group) > 1]
    sequences = [*firsts, *seconds, *(sequence for group in groups for sequence in group[2:])]
    labels = (
        torch.tensor([float(sample.arrays[SCORE][0]) for sample in features])
        if SCORE in features[0].arrays
        else torch.zeros(len(features), dtype=torch.long)
    )
    return Batch(
        inputs=padding.inputs(sequences),
        labels=labels,
        num_targets=len(features),
        num_tokens=sum(sample.length for sample in features),
        sample_ids=tuple(sample.sample_id for sample in features),
        text_ids=tuple(text_id(sequence) for sequence in sequences),
        group_sizes=tuple(len(group) for group in groups),
    )


def text_id(sequence: Features) -> int:
    """Return a digest of the sequence's tokens as a non-negative integer of at most 52 bits."""
    content = np.ascontiguousarray(sequence.arrays["input_ids"], np.uint32).tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _TEXT_ID_BITS)


def pooled_vectors(model: nn.Module, batch: Batch, pooling: Pooling) -> Tensor:
    """Return one vector per sequence, float32 [sequences, dimensions], not normalized."""
    states: Tensor = model(**forward_inputs(model, batch)).last_hidden_state  # [sequences, length, dimensions]
    mask = batch.inputs["attention_mask"]
    if pooling == "mean":
        weights = mask.to(torch.float32)[..., None]
        vectors: Tensor = (states.to(torch.float32) * weights).sum(dim=1) / weights.sum(dim=1)
        return vectors
    if pooling == "cls":
        return states[:, 0].to(torch.float32)
    last = (mask.sum(dim=1) - 1)[:, None, None].expand(-1, 1, states.shape[-1])
    return states.gather(1, last).squeeze(1).to(torch.float32)
