"""Shared parts of the classification tasks: classes and their weights, summed losses, padding."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.labelled import (
    Classes,
    are_bits,
    balanced_weights,
    label_name,
    positive_weights,
    present_classes,
    sort_names,
)
from finetune.data.features import Features, result_or_error
from finetune.data.formats.columns import NO_LABELS
from finetune.data.rows import Row
from finetune.errors import DataError
from finetune.task.causal_lm import pad_id
from finetune.task.model_inputs import forward_logits, pad_rows, sample_logits
from finetune.task.protocol import DataFacts, TaskContext

LabelsOf = Callable[[Row], Sequence[Any] | Mapping[str, Any] | None]
"""Returns the labels of a row, or 0 or 1 by class name; None if it has none."""

_MAX_CLASSES, _MAX_LISTED_CLASSES = 10_000, 20


@dataclass(frozen=True)
class WeightedClasses:
    """The classes and their weights in the loss; without weights, every class has weight 1.

    For single-label rows, 'balanced' weights average 1 over the training rows. A step divides the sum of the weighted
    losses by the number of targets, not by the sum of the weights, so the result does not depend on how the batch is
    split into microbatches and ranks.
    """

    classes: Classes
    weights: tuple[float, ...] | None = None
    counts: tuple[int, ...] = field(default=(), compare=False)  # rows per class in the training data, if counted
    is_vector: bool = False  # a list of labels is 0 or 1 for each class
    lines: tuple[str, ...] = field(default=(), compare=False)  # about the labels of the training data
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def data_facts(self) -> DataFacts:
        """Return the values that `find_classes` reads when there are no rows, and the class counts as log lines."""
        values: dict[str, Any] = {
            "labels": list(self.classes.names),
            "class_weights": self.weights and list(self.weights),
        }
        values |= {"is_vector": True} if self.is_vector else {}
        if not self.counts:
            return DataFacts(values, self.lines)
        shown = islice(zip(self.classes.names, self.counts, strict=True), _MAX_LISTED_CLASSES)
        texts = [f"`{name}` {count:,}" for name, count in shown]
        if self.weights:
            texts = [f"{text} (weight {weight:.3g})" for text, weight in zip(texts, self.weights, strict=False)]
        more = len(self.counts) - len(texts)
        listed = f"{', '.join(texts)}{f' and {more} more' if more else ''}"
        return DataFacts(values, (*self.lines, f"data.train: {len(self.counts)} classes: {listed}"))

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return the model config values of the classes."""
        return class_head_values(self.classes.names)

    def weight_tensor(self, device: torch.device) -> Tensor | None:
        """Return the weights, [classes], on the device: they are copied there once."""
        if self.weights is None:
            return None
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.weights, dtype=torch.float32, device=device)
        return self._on_device[device]

    def loss_sums(self, logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Mapping[str, Tensor]:
        """Return `loss_sum`, that of `class_loss_sum` with the weights of the classes."""
        weights = self.weight_tensor(labels.device)
        return {"loss_sum": class_loss_sum(logits, labels, weights=weights, label_smoothing=label_smoothing)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_device": {}}  # data loader workers have no device


def class_head_values(names: Sequence[str]) -> dict[str, Any]:
    """Return the model config values of these outputs; `num_labels` first, because setting it resets the names."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


def find_classes(context: TaskContext, labels_of: LabelsOf) -> WeightedClasses:
    """Return the classes and weights of the job's config, of an earlier start, or of the training rows.

    The rows are read once, twice where lists may be vectors, and only if needed. Raises DataError if they contain fewer
    than two classes (fewer than one for multi-label classification).
    """
    section, facts = context.section.classification, context.facts
    if facts and "labels" in facts:
        saved_weights, is_vector = facts.get("class_weights"), facts.get("is_vector", False)
        saved_weights = tuple(saved_weights) if saved_weights else None
        return WeightedClasses(Classes(tuple(facts["labels"])), saved_weights, is_vector=is_vector)
    is_balanced, is_multi = section.class_weights == "balanced", section.kind == "multi_label"
    weights = None if isinstance(section.class_weights, str) else section.class_weights
    has_bits = not section.labels or not {"0", "1"}.isdisjoint(section.labels)  # as names of classes
    if section.labels and not is_balanced and not (is_multi and has_bits):
        return WeightedClasses(Classes(section.labels), weights)
    length = _vector_length(context, labels_of) if is_multi else 0
    vector = section.labels or tuple(map(str, range(length)))  # the class of each number of a vector
    is_vector = length > 0 and (length == len(vector) or not has_bits)
    found = _count_labels(context, labels_of, vector=vector if is_vector else ())
    counts, first_error = found.counts, found.first_error
    none = _no_labels(counts, found.texts) - set(section.labels)
    lines = tuple(
        f"data.train: `{name}` ({counts.pop(name):,} times) means that there is no label: not in the loss. If it is a "
        "class, write it in `task.classification.labels`."
        for name in sorted(none)
    )
    names = section.labels or (*found.in_order, *sort_names(counts.keys() - found.in_order))
    if not counts and not found.in_order and first_error is not None:
        raise DataError(f"data.train: no row has a valid label; the first error: {first_error}") from first_error
    if not section.labels and len(names) < (1 if is_multi else 2):
        raise DataError(
            f"the training rows contain {len(names)} class{'es' if not names else ''}"
            f"{f' (`{names[0]}`)' if names else ''}: there is nothing to classify. "
            + " ".join(["Write `task.classification.labels` if there are others.", *lines])
        )
    if not section.labels and len(names) > _MAX_CLASSES:
        some = ", ".join(f"`{name}`" for name in islice(counts, 3))
        raise DataError(
            f"the training rows contain {len(names):,} classes ({some}, ...): is the column a class label? "
            "Map another column with `columns: {label: ...}`, or write `task.classification.labels`."
        )
    if is_vector:
        lines += (f"data.train: every list of labels has {length} numbers, 0 or 1, and each position is a class",)
    class_counts = [counts.get(name, 0) for name in names]
    if is_balanced:
        weights = positive_weights(class_counts, found.num_rows) if is_multi else balanced_weights(class_counts)
    return WeightedClasses(Classes(names), weights, tuple(class_counts), is_vector=is_vector, lines=lines)


@dataclass
class _Labels:
    """The labels of the training rows."""

    counts: Counter[str] = field(default_factory=Counter)  # rows by name of a class
    in_order: dict[str, None] = field(default_factory=dict)  # names of the classes in objects
    texts: set[str] = field(default_factory=set)  # names that are texts
    num_rows: int = 0  # with labels, or an empty list of them
    first_error: DataError | None = None


def _count_labels(context: TaskContext, labels_of: LabelsOf, *, vector: Sequence[str]) -> _Labels:
    """Return the labels of the rows, in which lists are 0 or 1 for each class of `vector` if there are any."""
    found = _Labels()
    for row in context.rows():  # invalid labels are skipped: encoding the row reports them
        try:
            labels = labels_of(row)
            found.num_rows += labels is not None
            if vector and isinstance(labels, list):
                labels = dict(zip(vector, labels, strict=False))
            if isinstance(labels, Mapping):
                found.in_order.update(dict.fromkeys(labels))
            present = [label for label in present_classes(labels or ()) if label is not None]
            found.counts.update(set(map(label_name, present)))
            found.texts.update(label for label in present if isinstance(label, str))
        except DataError as error:
            found.first_error = found.first_error or error
    return found


def _vector_length(context: TaskContext, labels_of: LabelsOf) -> int:
    """Return the length of all lists of labels if they are 0 or 1 for each class; 0 if they are names of classes.

    To rule out lists of the classes 0 and 1, one has a value twice, or two have both values in another order.
    """
    first, is_clear = None, False
    for row in context.rows():
        labels = result_or_error(labels_of, row)
        if not isinstance(labels, list) or not labels:
            continue
        first = first or labels
        if len(labels) != len(first) or not are_bits(labels):
            return 0
        is_clear = is_clear or labels != first or len(set(labels)) < len(labels)
    return len(first) if first and is_clear and len(first) > 1 else 0


def _no_labels(names: Iterable[str], texts: Collection[str]) -> set[str]:
    """Return the names that mean "no label": -1 and -100 next to numbers from 0, or numbers next to texts.

    The classes -1 and 1 are a pair.
    """
    others = [name for name in names if name not in NO_LABELS]
    if others == ["1"] or any(name.startswith("-") and name[1:].isdecimal() for name in others):
        return set()
    are_numbers = all(map(str.isdecimal, others))
    return {name for name in NO_LABELS if name in names and (are_numbers or name not in texts)}


def class_loss_sum(
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the single-label cross-entropy in nats, summed over the targets, a float32 scalar.

    `logits` are [..., classes]; `labels` are class indices or IGNORED, [...], or the probabilities of all classes,
    [..., classes], one target per row. A target's loss is multiplied by the weight of its class; label smoothing is
    torch's (Szegedy et al., 2015, arXiv:1512.00567). The sum is not divided by the weights.
    """
    flat = logits.reshape(-1, logits.shape[-1]).to(torch.float32)
    targets = labels.reshape(-1, flat.shape[-1]).to(torch.float32) if labels.is_floating_point() else labels.reshape(-1)
    return functional.cross_entropy(
        flat, targets, weight=weights, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )


def multi_label_loss_sum(logits: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Return the binary cross-entropy in nats, averaged over the classes, summed over the rows, a float32 scalar.

    `logits` are [rows, classes], and `labels` 0 or 1 of the same shape; a row of NaN does not count. `weights` multiply
    the loss of positive labels only (torch's `pos_weight`).
    """
    counts, targets = _mask_nan_rows(labels)
    losses = functional.binary_cross_entropy_with_logits(
        logits.to(torch.float32), targets, pos_weight=weights, reduction="none"
    )
    return (losses.mean(dim=-1) * counts).sum()


def regression_loss_sum(predictions: Tensor, labels: Tensor) -> Tensor:
    """Return the squared error, averaged over a row's numbers, summed over the rows, a float32 scalar.

    Both are [rows, numbers]; a row of NaN does not count.
    """
    counts, targets = _mask_nan_rows(labels)
    return ((predictions.to(torch.float32) - targets).square().mean(dim=-1) * counts).sum()


def _mask_nan_rows(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 for rows that count and 0 for others, [rows], and the labels without NaN, both float32."""
    return (~labels.isnan().any(dim=-1)).to(torch.float32), labels.nan_to_num().to(torch.float32)


def class_prediction(names: Sequence[str], probabilities: Tensor) -> dict[str, Any]:
    """Return the most likely class and its probability, and the `probabilities` of all by name."""
    index = int(probabilities.argmax())
    by_name = dict(zip(names, probabilities.tolist(), strict=True))
    return {"label": names[index], "score": by_name[names[index]], PROBABILITIES: by_name}


PROBABILITIES = "probabilities"
"""The part of a prediction that is written on demand."""


class TextPadding:
    """The padding token: the tokenizer's, else its end-of-sequence token, which becomes the padding token.

    A decoder classifies at the last token that is not padding, which it locates by this id only, so the model's config
    and the tokenizer must agree. A text that ends with the padding token itself (if that is end-of-sequence) is
    classified at the token before, alone and in batches.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.token_id = pad_id(tokenizer)
        self.head_values = {"pad_token_id": self.token_id}  # for the model's config
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    def inputs(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """Return the model inputs, [batch, length] each, padded on the right."""
        pad_values = {"input_ids": self.token_id, "token_type_ids": 0}
        inputs = {name: pad_rows(arrays, pad_values[name]) for name, arrays in input_columns(features).items()}
        lengths = torch.tensor([sample.length for sample in features])
        longest = inputs["input_ids"].shape[1]
        return {**inputs, "attention_mask": (torch.arange(longest)[None] < lengths[:, None]).long()}


def input_columns(features: Sequence[Features]) -> dict[str, list[np.ndarray]]:
    """Return the model's input arrays of every text, by name."""
    names = [name for name in ("input_ids", "token_type_ids") if name in features[0].arrays]
    return {name: [sample.arrays[name] for sample in features] for name in names}


def classifier_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's logits in float32: [batch, outputs], or [batch, length, outputs] for token classification."""
    if batch.cumulative_lengths is None:
        logits: Tensor = model(**batch.inputs).logits
    else:
        logits = forward_logits(model, batch) if batch.targets is not None else sample_logits(model, batch)
    return logits.to(torch.float32)
