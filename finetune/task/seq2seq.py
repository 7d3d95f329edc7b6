"""Sequence to sequence: an encoder reads the source, and a decoder is trained to generate the target."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.encoding.text import SourceTargetEncoder
from finetune.data.encoding.tokenizer import num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SourceTargetLengthLimit
from finetune.task.causal_lm import TokenTask
from finetune.task.model_inputs import decoder_input_ids, pad_rows, unwrap_model
from finetune.task.protocol import GenerationPrompt, TaskContext


class Seq2SeqTask(TokenTask):
    """Predict each token of the target from the source and the tokens before it, end-of-sequence included.

    Rows become `input_ids`, the source followed by the target, and `is_target`, which marks the target.
    """

    head = "seq2seq_lm"

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        data, section = self.data, context.section.seq2seq
        self._encoder = SourceTargetEncoder(
            self.tokenizer, prefix=section.source_prefix, allow_special_tokens=data.allow_special_tokens
        )
        self._length_limit = SourceTargetLengthLimit(
            data.longest,
            section.max_target_length or data.longest,
            data.over_length,
            data.truncate_side,
            num_special_tokens_around(self.tokenizer),
        )
        self._identity = section.model_dump()

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return sources and targets padded on the right; labels[b, t] is the target's token t."""
        pairs = [_source_and_target(sample) for sample in features]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        lengths = np.array([len(source) for source in sources])
        mask = np.arange(lengths.max()) < lengths[:, None]
        labels = pad_rows(targets, IGNORED)
        return Batch(
            inputs={
                "input_ids": pad_rows(sources, self.pad_id),
                "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            },
            labels=labels,
            num_targets=sum(map(len, targets)),
            num_tokens=sum(sample.length for sample in features),
            sample_ids=tuple(sample.sample_id for sample in features),
            lengths=tuple(map(len, sources)),
            targets=Targets.of(labels.numpy()),
        )

    def model_inputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return the inputs with which the decoder predicts the labels.

        These are the targets shifted by one, as the model itself shifts labels; with labels it would compute a mean
        loss.
        """
        before = decoder_input_ids(unwrap_model(model), batch.labels)
        return {**batch.inputs, "decoder_input_ids": before, "use_cache": False}

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return the source, and the target with its end-of-sequence token."""
        source, target = _source_and_target(features)
        return GenerationPrompt(input_ids=tuple(source.tolist()), reference_ids=tuple(target.tolist()))


def _source_and_target(features: Features) -> tuple[np.ndarray, np.ndarray]:
    ids, is_target = features.arrays["input_ids"].astype(np.int64), features.arrays["is_target"]
    return ids[~is_target], ids[is_target]
