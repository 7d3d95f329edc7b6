"""The problem types of text classification: a single label, multiple labels, or regression."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from finetune.data.encoding.labelled_text import ClassLabelEncoder, LabelEncoder, MultiLabelEncoder, NumericLabelEncoder
from finetune.runtime.files.recorded_names import recorded_as
from finetune.task.classification.classes import (
    WeightedClasses,
    class_loss_sum,
    multi_label_loss_sum,
    regression_loss_sum,
)
from finetune.task.metrics import class_metrics, multi_label_metrics, regression_metrics
from finetune.task.protocol import DataFacts


class ProblemType(Protocol):
    """The labels, the loss, and the metrics of a classifier of texts."""

    @property
    def labels(self) -> LabelEncoder:
        """Return the encoder of a row's label."""

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return what the model's config says of its outputs."""

    @property
    def data_facts(self) -> DataFacts:
        """Return what was read from the rows."""

    def batch_labels(self, labels: Tensor) -> Tensor:
        """Return the labels of a batch, [rows, numbers of a label], as the loss takes them."""

    def label_text(self, label: np.ndarray) -> str:
        """Return the label as text."""

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the trained loss, summed over the rows."""

    def unweighted_loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the same without weights and smoothing: what an evaluation shows."""

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the predictions, one row each."""

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return the metrics, from float64 [rows, columns]."""


@dataclass(frozen=True)
class _WithClasses:
    """What both kinds with classes have in common."""

    classification: WeightedClasses

    @property
    def data_facts(self) -> DataFacts:
        """Return the classes, their weights and how often each occurs."""
        return self.classification.data_facts


@recorded_as("OneOfMany")
@dataclass(frozen=True)
class SingleLabel(_WithClasses):
    """Exactly one class."""

    label_smoothing: float = 0.0

    @property
    def labels(self) -> LabelEncoder:
        """Return what gives the index of the class."""
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
        """Return the likeliest class."""
        return logits.argmax(dim=-1)

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return `accuracy`, `macro_f1`, `micro_f1` and `mcc`."""
        return class_metrics(labels[:, 0], predicted[:, 0], num_classes=len(self.classification.classes))


@recorded_as("SomeOfMany")
@dataclass(frozen=True)
class MultiLabel(_WithClasses):
    """Any number of classes, each by itself."""

    @property
    def labels(self) -> LabelEncoder:
        """Return an encoder of labels to 0 or 1 for each class."""
        return MultiLabelEncoder(self.classification.classes)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return number and names of the classes."""
        return {**self.classification.head_values, "problem_type": "multi_label_classification"}

    def batch_labels(self, labels: Tensor) -> Tensor:
        """Return 0 or 1 for each class, float32 [rows, classes]."""
        return labels.to(torch.float32)

    def label_text(self, label: np.ndarray) -> str:
        """Return the names of the classes, or that there is none."""
        names = self.classification.classes.names
        return ", ".join(names[place] for place in np.flatnonzero(label)) or "none"

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
class Regression:
    """A number, or several."""

    num_numbers: int
    names: tuple[str, ...] = ()

    @property
    def labels(self) -> LabelEncoder:
        """Return what reads the numbers."""
        return NumericLabelEncoder(self.num_numbers)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return how many numbers there are, and their names where they have any."""
        names = self.names or tuple(f"LABEL_{n}" for n in range(self.num_numbers))
        return {
            "num_labels": self.num_numbers,
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "regression",
        }

    @property
    def data_facts(self) -> DataFacts:
        """Return how many numbers there are."""
        return DataFacts({"num_numbers": self.num_numbers, "labels": list(self.names)})

    def batch_labels(self, labels: Tensor) -> Tensor:
        """Return the numbers, float32 [rows, numbers]."""
        return labels.to(torch.float32)

    def label_text(self, label: np.ndarray) -> str:
        """Return the numbers."""
        return ", ".join(f"{number:g}" for number in label)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error, averaged over the numbers of a row."""
        return regression_loss_sum(logits, labels)

    def unweighted_loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the same."""
        return regression_loss_sum(logits, labels)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return the outputs."""
        return logits

    def metrics(self, labels: Tensor, predicted: Tensor) -> Mapping[str, float]:
        """Return `mse`, `pearson` and `spearman`."""
        return regression_metrics(labels, predicted)
