"""Sequence to sequence: an encoder reads the source, and a decoder is trained to generate the target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.encoding.text import SourceTargetEncoder
from finetune.data.encoding.tokenizer import num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SourceTargetLengthLimit
from finetune.task.causal_lm import make_target_loss, pad_id
from finetune.task.metrics import token_metrics
from finetune.task.model_inputs import decoder_input_ids, pad_rows, unwrap_model
from finetune.task.protocol import BaseTask, GenerationPrompt, ModelHead, SampleSpec, TaskContext


class Seq2SeqTask(BaseTask):
    """Predict each token of the target from the source and the tokens before it, end-of-sequence included.

    Rows become `input_ids`, the source followed by the target, and `is_target`, which marks the target.
    """

    head: ModelHead = "seq2seq_lm"

    def __init__(self, context: TaskContext) -> None:
        section, self.data = context.section, context.data
        self.pad_id = pad_id(context.tokenizer)
        self.loss = make_target_loss(context)
        self._section = section.seq2seq
        self._frame = num_special_tokens_around(context.tokenizer)
        self._encoder = SourceTargetEncoder(
            context.tokenizer,
            prefix=self._section.source_prefix,
            allow_special_tokens=self.data.allow_special_tokens,
        )

    @property
    def samples(self) -> SampleSpec:
        """Return samples limited by `data.max_length` (source) and `task.seq2seq.max_target_length` (target)."""
        data, section = self.data, self._section
        limit = SourceTargetLengthLimit(
            data.longest,
            section.max_target_length or data.longest,
            data.over_length,
            data.truncate_side,
            self._frame,
        )
        return replace(super().samples, length_limit=limit, identity=section.model_dump())

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

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, with label smoothing or z-loss, the plain `cross_entropy`."""
        return self.loss.sums(model, batch, _seq2seq_inputs(model, batch))

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` (the plain cross-entropy), `num_targets` and `num_correct`."""
        return self.loss.evaluation_sums(model, batch, _seq2seq_inputs(model, batch))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `token_accuracy`."""
        return token_metrics(sums)

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return the source, and the target with its end-of-sequence token."""
        source, target = _source_and_target(features)
        return GenerationPrompt(input_ids=tuple(source.tolist()), reference_ids=tuple(target.tolist()))


def _seq2seq_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the inputs with which the decoder predicts the labels.

    These are the targets shifted by one, as the model itself shifts labels; with labels it would compute a mean loss.
    """
    before = decoder_input_ids(unwrap_model(model), batch.labels)
    return {**batch.inputs, "decoder_input_ids": before, "use_cache": False}


def _source_and_target(features: Features) -> tuple[np.ndarray, np.ndarray]:
    ids, is_target = features.arrays["input_ids"].astype(np.int64), features.arrays["is_target"]
    return ids[~is_target], ids[is_target]
