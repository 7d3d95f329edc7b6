"""Classification: of texts and pairs of texts (single-label, multi-label, regression), of words, and of images.

Images are decoded in collation, in the loader's workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.sections.data import ImagesSection
from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.labelled import (
    IMAGE,
    LABEL,
    LABELS,
    Classes,
    ClassLabelEncoder,
    LabelEncoder,
    LabelledImageEncoder,
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
from finetune.data.formats.unlabeled import read_unlabeled_image, read_unlabeled_text, read_unlabeled_words
from finetune.data.images import ImageTransform, decode_image, mix_images
from finetune.data.rows import Row
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError
from finetune.runtime.seeds import derive_seed
from finetune.task.classes import (
    PROBABILITIES,
    TextPadding,
    class_head_values,
    class_loss_sum,
    class_prediction,
    classifier_logits,
    find_classes,
    input_columns,
    multi_label_loss_sum,
    regression_loss_sum,
)
from finetune.task.metrics import (
    TOP_K,
    are_entity_tags,
    class_metrics,
    entity_metrics,
    multi_label_metrics,
    regression_metrics,
)
from finetune.task.model_inputs import collate_row, is_padding_free, pad_rows, unwrap_model
from finetune.task.protocol import BaseTask, DataFacts, EvaluationOutput, Predictor, TaskContext

RECORDED_KINDS = {"single_label": "OneOfMany", "multi_label": "SomeOfMany", "regression": "Regression"}
"""What the identity of prepared data calls each `task.classification.kind`; it never changes."""


class TextClassificationTask(BaseTask):
    """Predict the class, the classes or the numbers of a text; raises DataError if the rows have no valid labels.

    A row is encoded to `input_ids`, `token_type_ids` if the tokenizer returns them, and `labels`. A row is one target.
    """

    head = "sequence_classification"

    def __init__(self, context: TaskContext) -> None:
        data, section, facts = context.data, context.section.classification, context.facts or {}
        self._batching = data.batching
        self.kind = section.kind
        self.label_smoothing = context.section.label_smoothing if self.kind == "single_label" else 0.0
        self.padding = TextPadding(context.tokenizer)
        labels: LabelEncoder
        if self.kind == "regression":
            num = facts.get("num_numbers") or len(section.labels) or _num_numbers(context)
            labels, names = NumericLabelEncoder(num), section.labels or tuple(f"LABEL_{n}" for n in range(num))
            self.data_facts = DataFacts({"num_numbers": num, "labels": list(section.labels)})
            head_values: Mapping[str, Any] = class_head_values(names)
            problem_type = "regression"
        else:
            is_multi = self.kind == "multi_label"
            self.classification = find_classes(context, partial(_labels_of, is_multi=is_multi))
            classes = self.classification.classes
            labels = ClassLabelEncoder(classes)
            if is_multi:
                labels = MultiLabelEncoder(classes, self.classification.is_vector)
            self.data_facts = self.classification.data_facts
            head_values = self.classification.head_values
            problem_type = f"{self.kind}_classification"
        self.head_values = {**head_values, "problem_type": problem_type, **self.padding.head_values}
        self._encoder = LabelledTextEncoder(
            context.tokenizer, labels, cut=Truncation.of(data), allow_special_tokens=data.allow_special_tokens
        )
        identity = {name: value for name, value in self.data_facts.values.items() if name != "class_weights"}
        self._identity = {"kind": RECORDED_KINDS[self.kind], **identity}
        self._outputs = tuple(names if self.kind == "regression" else classes.names)

    @property
    def predictor(self) -> Predictor:
        """Return how it predicts the class with its probability, the classes above 1/2 with theirs, or the numbers."""
        names = self._outputs
        label = {"single_label": names[0], "multi_label": [], "regression": [0.0] * len(names)}[self.kind]
        return Predictor(
            read=read_unlabeled_text,
            encode=lambda rows: self.encode([{**row, LABEL: label} for row in rows]),  # any label
            collate=self.collate,
            outputs=self._probabilities,
            prediction=self._prediction,
        )

    def _probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = classifier_logits(model, batch)
        if self.kind == "regression":
            return logits
        return logits.sigmoid() if self.kind == "multi_label" else logits.softmax(dim=-1)

    def _prediction(self, row: Row, outputs: Sequence[Tensor]) -> Mapping[str, Any]:
        names, (output,) = self._outputs, outputs
        if self.kind == "single_label":
            return class_prediction(names, output)
        values = output.tolist()
        if self.kind == "regression":
            return {"value": values[0]} if len(values) == 1 else {"values": values}
        by_name = dict(zip(names, values, strict=True))
        present = {name: value for name, value in by_name.items() if value > 0.5}
        return {"labels": list(present), "scores": list(present.values()), PROBABILITIES: by_name}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the texts padded or concatenated; labels are int64 [texts] or float32 [texts, outputs]."""
        encoded = torch.from_numpy(np.stack([sample.arrays[LABELS] for sample in features]))
        labels = encoded[:, 0].long() if self.kind == "single_label" else encoded.to(torch.float32)
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
        """Return the class, the classes (`none` without one) or the numbers."""
        label = features.arrays[LABELS]
        if self.kind == "regression":
            return ", ".join(f"{number:g}" for number in label)
        names = self.classification.classes.names
        if self.kind == "multi_label":
            return ", ".join(names[index] for index in np.flatnonzero(label)) or "none"
        return names[int(label[0])]

    def dummy_batch(self, features: Features) -> Batch:
        """Return the row as a batch without weight in the loss; floating-point labels are NaN."""
        batch = super().dummy_batch(features)
        is_number = batch.labels.is_floating_point()
        return replace(batch, labels=torch.full_like(batch.labels, torch.nan)) if is_number else batch

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss summed over the rows, with class weights and label smoothing, a float32 scalar."""
        logits = classifier_logits(model, batch)
        weights = None if self.kind == "regression" else self.classification.weight_tensor(logits.device)
        return {"loss_sum": self._loss_sum(logits, batch.labels, weights=weights, label_smoothing=self.label_smoothing)}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and the id, label and prediction of every row: its class, classes above 1/2, or numbers."""
        logits = classifier_logits(model, batch)
        num_targets = torch.full((), batch.num_targets, device=logits.device)
        sums = {"loss_sum": self._loss_sum(logits, batch.labels), "num_targets": num_targets}
        if not batch.sample_ids:
            return EvaluationOutput(sums)
        predictions = logits
        if self.kind != "regression":
            predictions = logits > 0 if self.kind == "multi_label" else logits.argmax(dim=-1)
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)[:, None]
        on_host = [values.reshape(len(ids), -1).to("cpu", torch.float64) for values in (batch.labels, predictions)]
        return EvaluationOutput(sums, torch.cat([ids, *on_host], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss` and `class_metrics`, `multi_label_metrics` or `regression_metrics`."""
        num_targets = sums["num_targets"]
        loss = {"loss": sums["loss_sum"] / num_targets if num_targets else float("nan")}
        if records is None:
            return loss
        labels, predicted = records[:, 1:].chunk(2, dim=1)
        if self.kind == "single_label":
            num_classes = len(self.classification.classes)
            return loss | class_metrics(labels[:, 0], predicted[:, 0], num_classes=num_classes)
        return loss | (multi_label_metrics if self.kind == "multi_label" else regression_metrics)(labels, predicted)

    def _loss_sum(
        self, logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor:
        if self.kind == "single_label":
            return class_loss_sum(logits, labels, weights=weights, label_smoothing=label_smoothing)
        if self.kind == "multi_label":
            return multi_label_loss_sum(logits, labels, weights=weights)
        return regression_loss_sum(logits, labels)


def _labels_of(row: Row, *, is_multi: bool) -> Sequence[Any] | Mapping[str, Any] | None:
    label = label_of(row)
    if is_multi:
        return read_label_list(label)
    if isinstance(label, list | dict):
        ClassLabelEncoder(Classes(()))(label)  # raises with the remedy
    return [label]


def _num_numbers(context: TaskContext) -> int:
    """Return the number of values in the first numeric label."""
    first_error = None
    for row in context.rows():
        try:
            if (label := label_of(row)) is not None:
                return len(read_label_numbers(label))
        except DataError as error:
            first_error = first_error or error
    raise DataError(f"data.train: no row has a number as its label; the first error: {first_error or 'it is null'}")


class TokenClassificationTask(BaseTask):
    """Predict the class of every word; raises DataError for a tokenizer without word boundaries.

    A row is encoded to `input_ids`, `token_type_ids` if the tokenizer returns them, `is_target` and `labels`. The first
    token of every word is a target.
    """

    head = "token_classification"
    _length_limit: SampleLengthLimit

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
        frame = num_special_tokens_around(context.tokenizer)  # around every part of a split sentence
        self._length_limit = SampleLengthLimit(data.longest, data.over_length, data.truncate_side, frame)
        self._identity = {"labels": list(self.classification.classes.names)}

    @property
    def predictor(self) -> Predictor:
        """Return how it predicts the tag of every word with its probability; longer sentences are split."""
        any_tag = self.classification.classes.names[0]
        return Predictor(
            read=read_unlabeled_words,
            encode=lambda rows: self.encode([{**row, "tags": [any_tag] * len(row["tokens"])} for row in rows]),
            collate=self.collate,
            outputs=self._word_probabilities,
            prediction=self._tags,
            limit=replace(self._length_limit, over_length="split"),
        )

    def _word_probabilities(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        probabilities = classifier_logits(model, batch).softmax(dim=-1)  # [batch, length, classes]
        return [values[labels != IGNORED] for values, labels in zip(probabilities, batch.labels, strict=True)]

    def _tags(self, row: Row, outputs: Sequence[Tensor]) -> Mapping[str, Any]:
        names = self.classification.classes.names
        words = [class_prediction(names, word) for output in outputs for word in output]
        singles = {"tags": "label", "scores": "score", PROBABILITIES: PROBABILITIES}
        return {"tokens": row["tokens"], **{name: [word[key] for word in words] for name, key in singles.items()}}

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
        logits = classifier_logits(model, batch)
        return self.classification.loss_sums(logits, batch.labels, label_smoothing=self.label_smoothing)

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


def _word_labels(features: Features) -> np.ndarray:
    """Return the class at targets, IGNORED elsewhere."""
    return np.where(features.arrays["is_target"], features.arrays[LABELS].astype(np.int64), IGNORED)


class ImageClassificationTask(BaseTask):
    """Predict the class of an image.

    Rows become `label` (the number of the class) and `image` (encoded bytes).
    """

    head = "image_classification"
    _loading_cost = "heavy"

    def __init__(self, context: TaskContext) -> None:
        self.section: ImagesSection = context.data.images
        self.label_smoothing = context.section.label_smoothing
        self.views = ImageTransform(context.processor, self.section)
        self.classification = find_classes(context, lambda row: (row["label"],))
        self.head_values, self.data_facts = self.classification.head_values, self.classification.data_facts
        self._encoder = LabelledImageEncoder(self.classification.classes, self.views.mode)
        self._has_partners = self.section.mixup > 0 or self.section.cutmix > 0  # each image is mixed with another one
        self._identity = {"labels": list(self.classification.classes.names), "mode": self.views.mode}
        _ = self.views.size  # raises here, before any data is prepared

    @property
    def predictor(self) -> Predictor:
        """Return how it predicts the class with its probability."""
        names = self.classification.classes.names
        return Predictor(
            read=read_unlabeled_image,
            encode=lambda rows: self.encode([{**row, LABEL: names[0]} for row in rows]),  # any label
            collate=self.collate,
            outputs=lambda model, batch: image_logits(model, batch).float().softmax(dim=-1),
            prediction=lambda row, outputs: class_prediction(names, outputs[0]),
        )

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the images as pixels; in training, augmented views that depend only on step and sample."""
        pairs = [self._pixels_and_label(sample) for sample in features]
        labels = torch.stack([label for _, label in pairs])
        return Batch(
            inputs={"pixel_values": torch.stack([pixels for pixels, _ in pairs])},
            labels=labels,
            num_targets=len(features),
            num_tokens=len(features),
            sample_ids=tuple(sample.sample_id for sample in features),
        )

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the cross-entropy in nats summed over the images, with class weights and label smoothing."""
        logits = image_logits(model, batch)
        return self.classification.loss_sums(logits, batch.labels, label_smoothing=self.label_smoothing)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and each image's id, class, most likely class, and number of classes with higher logits."""
        logits, labels = image_logits(model, batch).float(), batch.labels
        sums = {"loss_sum": class_loss_sum(logits, labels), "num_targets": (labels != IGNORED).sum()}
        if not batch.sample_ids:
            return EvaluationOutput(sums)
        own = logits.gather(1, labels[:, None])  # [batch, 1]
        likelier = (logits > own).sum(dim=1)
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        columns = [column.to("cpu", torch.float64) for column in (labels, logits.argmax(dim=1), likelier)]
        return EvaluationOutput(sums, torch.stack([ids, *columns], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `accuracy`, `macro_f1` and, with more than 5 classes, `top5_accuracy`."""
        loss = sums["loss_sum"] / sums["num_targets"]
        if records is None:
            return {"loss": loss}
        num_classes = len(self.classification.classes)
        all_metrics = class_metrics(records[:, 1], records[:, 2], num_classes=num_classes)
        metrics = {name: all_metrics[name] for name in ("accuracy", "macro_f1")}
        if num_classes > TOP_K:
            metrics["top5_accuracy"] = (records[:, 3] < TOP_K).double().mean().item()
        return {"loss": loss, **metrics}

    def _pixels_and_label(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return the pixels and the class index, or with a partner, the probabilities of all classes."""
        own, label = self._view(features, "own"), int(features.arrays[LABEL][0])
        if features.seed == 0 or not self._has_partners:
            return own, torch.tensor(label)
        partner = features.partner or features
        other, other_label = self._view(partner, "partner"), int(partner.arrays[LABEL][0])
        chance = Random(derive_seed(features.seed, features.sample_id, "mix"))
        mixed = mix_images(own, other, mixup=self.section.mixup, cutmix=self.section.cutmix, random=chance)
        probabilities = torch.zeros(len(self.classification.classes))
        probabilities[label] += mixed.share
        probabilities[other_label] += 1 - mixed.share
        return mixed.pixels, probabilities

    def _view(self, features: Features, role: str) -> Tensor:
        image = decode_image(features.arrays[IMAGE].tobytes(), mode=self.views.mode)
        if features.seed == 0:
            return self.views.plain(image)
        return self.views.augmented(image, Random(derive_seed(features.seed, features.sample_id, "view", role)))


def image_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, [batch, classes]; pixels are cast to the dtype of the weights, which some models do not do."""
    pixels = batch.inputs["pixel_values"]
    dtype = getattr(unwrap_model(model), "dtype", None)
    logits: Tensor = model(pixel_values=pixels if dtype is None else pixels.to(dtype)).logits
    return logits
