"""Classification of texts and pairs of texts (single-label, multi-label, regression), and of the words of a text."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.labelled import (
    LABELS,
    Classes,
    ClassLabelEncoder,
    LabelEncoder,
    LabelledTextEncoder,
    MultiLabelEncoder,
    NumericLabelEncoder,
    TaggedWordsEncoder,
    label_of,
    read_label_list,
    read_label_numbers,
    tags_of,
)
from finetune.data.encoding.text import Truncation
from finetune.data.encoding.tokenizer import num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError
from finetune.runtime.files.digests import recorded_as, recorded_name
from finetune.task.classification.classes import (
    TextPadding,
    WeightedClasses,
    class_loss_sum,
    classifier_logits,
    find_classes,
    input_columns,
    multi_label_loss_sum,
    regression_loss_sum,
)
from finetune.task.metrics import are_entity_tags, class_metrics, entity_scores, multi_label_metrics, regression_metrics
from finetune.task.model_inputs import collate_row, is_padding_free, pad_rows
from finetune.task.protocol import BaseTask, DataFacts, EvaluationOutput, ModelHead, Row, SampleSpec, TaskContext


class ProblemType(ABC):
    """The labels, the loss and the metrics of a text classifier."""

    @property
    @abstractmethod
    def labels(self) -> LabelEncoder:
        """Return the encoder of a row's label."""

    @property
    @abstractmethod
    def head_values(self) -> Mapping[str, Any]:
        """Return the model config values of its outputs."""

    @property
    @abstractmethod
    def data_facts(self) -> DataFacts:
        """Return the facts that were read from the rows."""

    def batch_labels(self, labels: Tensor) -> Tensor:
        """Return a batch's labels in the format of the loss, float32 [rows, numbers of a label]."""
        return labels.to(torch.float32)

    @abstractmethod
    def label_text(self, label: np.ndarray) -> str:
        """Return the label as text."""

    @abstractmethod
    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the trained loss, summed over the rows."""

    def unweighted_loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of evaluations, summed over the rows: without class weights and label smoothing."""
        return self.loss_sum(logits, labels)

    @abstractmethod
    def predictions(self, logits: Tensor) -> Tensor:
        """Return the predictions, one per row."""

    @abstractmethod
    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return the metrics, from float64 [rows, columns]."""


@dataclass(frozen=True)
class _WithClasses(ProblemType):
    """Base of the problem types with classes."""

    classification: WeightedClasses

    @property
    def data_facts(self) -> DataFacts:
        """Return the classes, their weights and their counts."""
        return self.classification.data_facts


@recorded_as("OneOfMany")
@dataclass(frozen=True)
class SingleLabel(_WithClasses):
    """Exactly one class per row."""

    label_smoothing: float = 0.0

    @property
    def labels(self) -> LabelEncoder:
        """Return the encoder of a label to the index of its class."""
        return ClassLabelEncoder(self.classification.classes)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return number and names of the classes."""
        return {**self.classification.head_values, "problem_type": "single_label_classification"}

    def batch_labels(self, labels: Tensor) -> Tensor:
        """Return the indices, int64 [rows]."""
        return labels[:, 0].long()

    def label_text(self, label: np.ndarray) -> str:
        """Return the name of the class."""
        return self.classification.classes.names[int(label[0])]

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted and smoothed cross-entropy in nats."""
        weights = self.classification.weight_tensor(logits.device)
        return class_loss_sum(logits, labels, weights=weights, label_smoothing=self.label_smoothing)

    def unweighted_loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy in nats."""
        return class_loss_sum(logits, labels)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the most likely class."""
        return logits.argmax(dim=-1)

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return `accuracy`, `macro_f1`, `micro_f1` and `mcc`."""
        return class_metrics(labels[:, 0], predicted[:, 0], num_classes=len(self.classification.classes))


@recorded_as("SomeOfMany")
@dataclass(frozen=True)
class MultiLabel(_WithClasses):
    """Any number of independent classes per row."""

    @property
    def labels(self) -> LabelEncoder:
        """Return the encoder of labels to 0 or 1 per class."""
        return MultiLabelEncoder(self.classification.classes)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return number and names of the classes."""
        return {**self.classification.head_values, "problem_type": "multi_label_classification"}

    def label_text(self, label: np.ndarray) -> str:
        """Return the names of the classes, or `none`."""
        names = self.classification.classes.names
        return ", ".join(names[index] for index in np.flatnonzero(label)) or "none"

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted binary cross-entropy in nats, averaged over the classes."""
        return multi_label_loss_sum(logits, labels, weights=self.classification.weight_tensor(logits.device))

    def unweighted_loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy in nats, averaged over the classes."""
        return multi_label_loss_sum(logits, labels)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the classes whose probability is above one half."""
        return logits > 0

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return `subset_accuracy`, `macro_f1` and `micro_f1`."""
        return multi_label_metrics(labels, predicted)


@recorded_as("Regression")
@dataclass(frozen=True)
class Regression(ProblemType):
    """One or several numbers per row."""

    num_numbers: int
    names: tuple[str, ...] = ()

    @property
    def labels(self) -> LabelEncoder:
        """Return the encoder of the numbers."""
        return NumericLabelEncoder(self.num_numbers)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return the number of outputs and their names."""
        names = self.names or tuple(f"LABEL_{n}" for n in range(self.num_numbers))
        return {
            "num_labels": self.num_numbers,
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "regression",
        }

    @property
    def data_facts(self) -> DataFacts:
        """Return the number of outputs and their names, if they have any."""
        return DataFacts({"num_numbers": self.num_numbers, "labels": list(self.names)})

    def label_text(self, label: np.ndarray) -> str:
        """Return the numbers."""
        return ", ".join(f"{number:g}" for number in label)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error, averaged over the numbers of a row, summed over the rows."""
        return regression_loss_sum(logits, labels)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the outputs."""
        return logits

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return `mse`, `pearson` and `spearman`."""
        return regression_metrics(labels, predicted)


class TextClassificationTask(BaseTask):
    """Predict the class, the classes or the numbers of a text; raises DataError if the rows have no valid labels.

    A row is encoded to `input_ids`, `token_type_ids` if the tokenizer returns them, and `labels`. A row is one target.
    """

    head: ModelHead = "sequence_classification"

    def __init__(self, context: TaskContext) -> None:
        data = context.data
        self._batching = data.batching
        self.problem_type = _problem_type_of(context)
        self.padding = TextPadding(context.tokenizer)
        self.head_values = {**self.problem_type.head_values, **self.padding.head_values}
        self.data_facts = self.problem_type.data_facts
        is_cut = data.over_length == "truncate"
        cut = Truncation(data.longest, data.truncate_side) if is_cut else None
        self._encoder = LabelledTextEncoder(
            context.tokenizer, self.problem_type.labels, cut=cut, allow_special_tokens=data.allow_special_tokens
        )

    @property
    def samples(self) -> SampleSpec:
        """Return samples whose identity includes the encoding of the labels."""
        facts = {name: value for name, value in self.data_facts.values.items() if name != "class_weights"}
        return replace(super().samples, identity={"kind": recorded_name(self.problem_type), **facts})

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the texts padded or concatenated; labels are int64 [texts] or float32 [texts, outputs]."""
        encoded = torch.from_numpy(np.stack([sample.arrays[LABELS] for sample in features]))
        labels = self.problem_type.batch_labels(encoded)
        if is_padding_free(self._batching):
            return collate_row(features, input_columns(features), labels=labels)
        return Batch(
            inputs=self.padding.inputs(features),
            labels=labels,
            num_targets=len(features),
            num_tokens=sum(sample.length for sample in features),
            sample_ids=tuple(sample.sample_id for sample in features),
        )

    def label_text(self, features: Features) -> str:
        """Return the class, the classes or the numbers."""
        return self.problem_type.label_text(features.arrays[LABELS])

    def dummy_batch(self, features: Features) -> Batch:
        """Return the row as a batch without weight in the loss; floating-point labels are NaN."""
        batch = super().dummy_batch(features)
        is_number = batch.labels.is_floating_point()
        return replace(batch, labels=torch.full_like(batch.labels, torch.nan)) if is_number else batch

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss summed over the rows, with class weights and label smoothing, a float32 scalar."""
        return {"loss_sum": self.problem_type.loss_sum(classifier_logits(model, batch), batch.labels)}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and the id, label and prediction of every row."""
        logits = classifier_logits(model, batch)
        num_targets = torch.full((), batch.num_targets, device=logits.device)
        sums = {"loss_sum": self.problem_type.unweighted_loss_sum(logits, batch.labels), "num_targets": num_targets}
        if not batch.sample_ids:
            return EvaluationOutput(sums)
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)[:, None]
        columns = (batch.labels, self.problem_type.predictions(logits))
        on_host = [column.reshape(len(ids), -1).to("cpu", torch.float64) for column in columns]
        return EvaluationOutput(sums, torch.cat([ids, *on_host], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss` and the metrics of the problem type."""
        num_targets = sums["num_targets"]
        loss = {"loss": sums["loss_sum"] / num_targets if num_targets else float("nan")}
        if records is None:
            return loss
        labels, predicted = records[:, 1:].chunk(2, dim=1)
        return {**loss, **self.problem_type.metrics(labels, predicted)}


def _problem_type_of(context: TaskContext) -> ProblemType:
    """Return the problem type; reads the rows if the config does not determine it."""
    section, facts = context.section.classification, context.facts or {}
    if section.kind == "regression":
        num_numbers = facts.get("num_numbers") or len(section.labels) or _num_numbers(context)
        return Regression(num_numbers, section.labels)
    is_multi = section.kind == "multi_label"
    classification = find_classes(context, partial(_labels_of, is_multi=is_multi))
    if is_multi:
        return MultiLabel(classification)
    return SingleLabel(classification, context.section.label_smoothing)


def _labels_of(row: Row, *, is_multi: bool) -> Iterable[Any]:
    label = label_of(row)
    if is_multi:
        return read_label_list(label)
    if isinstance(label, list):
        ClassLabelEncoder(Classes(()))(label)  # raises with the remedy
    return [label]


def _num_numbers(context: TaskContext) -> int:
    """Return the number of values in the first numeric label."""
    first_error = None
    for row in context.rows():
        try:
            return len(read_label_numbers(label_of(row)))
        except DataError as error:
            first_error = first_error or error
    raise DataError(f"data.train: no row has a number as its label; the first error: {first_error}")


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
            token_labels = np.concatenate([_word_labels(sample) for sample in features])
            return collate_row(features, input_columns(features), token_labels=token_labels)
        labels = pad_rows([_word_labels(sample) for sample in features], IGNORED)
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


def _word_labels(features: Features) -> np.ndarray:
    """Return the class at targets, IGNORED elsewhere."""
    return np.where(features.arrays["is_target"], features.arrays[LABELS].astype(np.int64), IGNORED)
