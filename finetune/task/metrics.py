"""Metrics of an evaluation: of tokens, from sums; of classes, numbers and entities, from the records of all samples.

Sums are added up over batches and ranks. Metrics that are not sums (F1, correlations) are computed once, through
`torchmetrics`, from the gathered records. Entities are found and compared as CoNLL's evaluation and `seqeval` do
(Tjong Kim Sang and Buchholz, 2000, https://www.clips.uantwerpen.be/conll2000/chunking/conlleval.txt): a tag is `O`,
or the position of a word in an entity (`B`egin, `I`nside; also `E`nd and `S`ingle) and the entity's type, as in
`B-LOC`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from finetune.data.batch import IGNORED
from finetune.runtime.optional import require
from finetune.task.lm_loss.token_loss import cross_entropy_sum


def token_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the summed loss, the number of targets and how many of them have the highest logit, as scalars."""
    is_target = labels != IGNORED  # [batch, length]
    return {
        "loss_sum": cross_entropy_sum(logits, labels),
        "num_targets": is_target.sum(),
        "num_correct": ((logits.argmax(dim=-1) == labels) & is_target).sum(),
    }


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return loss (nats per target), perplexity (may be infinite) and token accuracy; NaN without targets."""
    num_targets = sums["num_targets"]
    if num_targets == 0:
        return dict.fromkeys(("loss", "perplexity", "token_accuracy"), math.nan)
    loss = sums["loss_sum"] / num_targets
    return {"loss": loss, "perplexity": perplexity(loss), "token_accuracy": sums["num_correct"] / num_targets}


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def class_metrics(labels: Tensor, predicted: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return accuracy, F1 averaged over classes (macro) and over samples (micro), and Matthews' correlation.

    Both are indices of classes, [samples]. A class that is neither there nor predicted does not count in `macro_f1`.
    """
    library = _library("classification")
    targets, found, num_labels = labels.long(), predicted.long(), max(2, num_classes)
    f1 = library.multiclass_f1_score
    return {
        "accuracy": float((targets == found).double().mean()),
        "macro_f1": float(f1(found, targets, num_classes=num_labels, average="macro")),
        "micro_f1": float(f1(found, targets, num_classes=num_labels, average="micro")),
        "mcc": float(library.multiclass_matthews_corrcoef(found, targets, num_classes=num_labels)),
    }


def multi_label_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the share of samples whose classes are all right, F1 averaged over classes (macro) and over all (micro).

    Both are 0 or 1, [samples, classes].
    """
    library = _library("classification")
    targets, found = labels.long(), predicted.long()
    subset_accuracy = float((targets == found).all(dim=1).double().mean())
    if targets.shape[1] == 1:  # the library wants several: twice the same class has the same F1
        targets, found = targets.expand(-1, 2), found.expand(-1, 2)
    scores = {
        f"{average}_f1": float(
            library.multilabel_f1_score(found, targets, num_labels=targets.shape[1], average=average)
        )
        for average in ("macro", "micro")
    }
    return {"subset_accuracy": subset_accuracy, **scores}


def regression_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the mean squared error, Pearson's and Spearman's correlation; of num_labels numbers, the mean over them.

    Both are float64, [samples, numbers]. There is no correlation (NaN) with what is the same for every sample.
    """
    library = _library("regression")
    return {
        "mse": float((predicted - labels).square().mean()),
        "pearson": _correlation(library.pearson_corrcoef, labels, predicted),
        "spearman": _correlation(library.spearman_corrcoef, labels, predicted),
    }


def _correlation(correlation: Callable[[Tensor, Tensor], Tensor], labels: Tensor, predicted: Tensor) -> float:
    if len(labels) < 2 or any((each == each[0]).all(dim=0).any() for each in (labels, predicted)):
        return math.nan
    columns = zip(predicted.T.contiguous(), labels.T.contiguous(), strict=True)
    return float(torch.stack([correlation(found, targets) for found, targets in columns]).mean())


def _library(part: str) -> ModuleType:
    """Return a part of `torchmetrics.functional`, which takes a second to import: only evaluations pay for it."""
    return require(f"torchmetrics.functional.{part}", extra="dev", purpose="Measuring classes and numbers")


TOP_K = 5
"""An answer among this number of the likeliest ones counts for `top5_accuracy`."""


def image_metrics(records: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return `accuracy`, `macro_f1` and, where there are more than TOP classes, `top5_accuracy`.

    `records` are [images, 4]: id, class, likeliest class, and how many classes are likelier than the image's own.
    Macro F1 is the mean over the classes that occur as label or as answer.
    """
    measured = class_metrics(records[:, 1], records[:, 2], num_classes=num_classes)
    found = {name: measured[name] for name in ("accuracy", "macro_f1")}
    if num_classes > TOP_K:
        found["top5_accuracy"] = (records[:, 3] < TOP_K).double().mean().item()
    return found


Entity = tuple[int, int, str]
"""First and last word of an entity, and its type."""

OUTSIDE = "O"
_TAG = re.compile(r"[BIES]-.+", re.DOTALL)


def are_entity_tags(names: Iterable[str]) -> bool:
    """Return whether the classes are such tags, with some that begin an entity."""
    inside = [name for name in names if name != OUTSIDE]
    return all(_TAG.fullmatch(name) for name in inside) and any(name.startswith("B-") for name in inside)


def find_entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of one sentence in their order.

    An entity begins at `B` and `S`, at another type, and at an `I` or `E` that follows `O`, `E` or `S`.
    """
    start, before = 0, (OUTSIDE, "")
    for number, tag in enumerate([*tags, OUTSIDE]):
        here = _split_tag(tag)
        if before[0] != OUTSIDE and _ends_entity(before, here):
            yield start, number - 1, before[1]
        if here[0] != OUTSIDE and _begins_entity(before, here):
            start = number
        before = here


@dataclass(frozen=True)
class EntityScores:
    """How many entities are found, exactly: the same words and the same type."""

    precision: float
    recall: float
    f1: float


def entity_scores(sentences: Iterable[tuple[Sequence[str], Sequence[str]]]) -> EntityScores:
    """Return precision, recall and F1 over the entities of all sentences, each its right and its predicted tags.

    A share of nothing is 0.
    """
    num_right = num_predicted = num_true = 0
    for tags, predicted in sentences:
        there, found = set(find_entities(tags)), set(find_entities(predicted))
        num_true, num_predicted = num_true + len(there), num_predicted + len(found)
        num_right += len(there & found)
    precision = num_right / num_predicted if num_predicted else 0.0
    recall = num_right / num_true if num_true else 0.0
    f1 = 2 * num_right / (num_predicted + num_true) if num_right else 0.0
    return EntityScores(precision, recall, f1)


def _split_tag(tag: str) -> tuple[str, str]:
    place, _, kind = tag.partition("-")
    return place, kind


def _ends_entity(before: tuple[str, str], here: tuple[str, str]) -> bool:
    """Return whether the entity of the word before is over."""
    return before[0] in "ES" or here[0] in "BSO" or before[1] != here[1]


def _begins_entity(before: tuple[str, str], here: tuple[str, str]) -> bool:
    """Return whether an entity begins at this word."""
    return here[0] in "BS" or before[0] in "ESO" or before[1] != here[1]
