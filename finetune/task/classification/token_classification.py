"""Token classification: predict the class of every word, such as its entity tag."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.labelled import LABELS, TaggedWordsEncoder, tags_of
from finetune.data.encoding.tokenizer import num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.task.classification.classes import (
    TextPadding,
    class_loss_sum,
    classifier_logits,
    find_classes,
    input_columns,
)
from finetune.task.metrics import are_entity_tags, class_metrics, entity_scores
from finetune.task.model_inputs import collate_row, is_padding_free, pad_rows
from finetune.task.protocol import BaseTask, EvaluationOutput, ModelHead, SampleSpec, TaskContext


class TokenClassificationTask(BaseTask):
    """Predict the class of every word; raises DataError for a tokenizer without word boundaries.

    A row is encoded to `input_ids`, `token_type_ids` if the tokenizer returns them, `is_target` and `labels`. The first
    token of every word is a target.
    """

    head: ModelHead = "token_classification"

    def __init__(self, context: TaskContext) -> None:
        data = context.data
        self._batching = data.batching
        self.classification = find_classes(context, tags_of)
        self.label_smoothing = context.section.label_smoothing
        self.padding = TextPadding(context.tokenizer)
        self.head_values = {**self.classification.head_values, **self.padding.head_values}
        self.data_facts = self.classification.data_facts
        self._encoder = TaggedWordsEncoder(
            context.tokenizer, self.classification.classes, allow_special_tokens=data.allow_special_tokens
        )
        frame = num_special_tokens_around(context.tokenizer)
        self._length_limit = SampleLengthLimit(data.longest, data.over_length, data.truncate_side, frame)

    @property
    def samples(self) -> SampleSpec:
        """Return samples whose identity includes the class order; every part of a split sentence has special tokens."""
        identity = {"labels": list(self.classification.classes.names)}
        return replace(super().samples, length_limit=self._length_limit, identity=identity)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the sentences padded or concatenated; labels[b, t] is the class of the word that starts at token t."""
        if is_padding_free(self._batching):
            token_labels = np.concatenate([_labels(sample) for sample in features])
            return collate_row(features, input_columns(features), token_labels=token_labels)
        labels = pad_rows([_labels(sample) for sample in features], IGNORED)
        return Batch(
            inputs=self.padding.inputs(features),
            labels=labels,
            num_targets=int((labels != IGNORED).sum()),
            num_tokens=sum(sample.length for sample in features),
            sample_ids=tuple(sample.sample_id for sample in features),
        )

    def label_text(self, features: Features) -> str:
        """Return the words' tags in order."""
        names = self.classification.classes.names
        return " ".join(names[label] for label in features.arrays[LABELS][features.arrays["is_target"]])

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the cross-entropy in nats summed over the words, with class weights and label smoothing."""
        weights = self.classification.weight_tensor(batch.labels.device)
        logits, smoothing = classifier_logits(model, batch), self.label_smoothing
        loss_sum = class_loss_sum(logits, batch.labels, weights=weights, label_smoothing=smoothing)
        return {"loss_sum": loss_sum}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and the sample id, class and most likely class of every word."""
        logits, labels = classifier_logits(model, batch), batch.labels
        sums = {"loss_sum": class_loss_sum(logits, labels), "num_targets": (labels != IGNORED).sum()}
        if not batch.sample_ids:
            return EvaluationOutput(sums)
        labels, predicted = torch.stack([labels, logits.argmax(dim=-1)]).to("cpu", torch.float64)  # [batch, length]
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        if batch.cumulative_lengths is None:
            ids = ids[:, None].expand_as(labels)
        else:
            ids = ids.repeat_interleave(torch.tensor(batch.lengths))[None]
        is_target = labels != IGNORED
        return EvaluationOutput(sums, torch.stack([values[is_target] for values in (ids, labels, predicted)], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `accuracy`, `macro_f1`, and precision, recall and F1 of entities if the classes are tags."""
        num_targets = sums["num_targets"]
        loss = {"loss": sums["loss_sum"] / num_targets if num_targets else float("nan")}
        if records is None:
            return loss
        names = self.classification.classes.names
        measured = class_metrics(records[:, 1], records[:, 2], num_classes=len(names))
        word_metrics = {name: measured[name] for name in ("accuracy", "macro_f1")}
        return loss | word_metrics | (entity_metrics(records, names) if are_entity_tags(names) else {})


def entity_metrics(records: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return the `entity_scores` of records [words, 3] in order: sample, class and predicted class."""
    sentences = groupby(records.long().tolist(), key=lambda record: record[0])
    pairs = ([(label, predicted) for _, label, predicted in words] for _, words in sentences)
    scores = entity_scores(
        ([names[label] for label, _ in words], [names[predicted] for _, predicted in words]) for words in pairs
    )
    return {"entity_f1": scores.f1, "entity_precision": scores.precision, "entity_recall": scores.recall}


def _labels(features: Features) -> np.ndarray:
    """Return the class at targets, IGNORED elsewhere."""
    return np.where(features.arrays["is_target"], features.arrays[LABELS].astype(np.int64), IGNORED)
