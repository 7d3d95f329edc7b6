"""Evaluation metrics: token metrics from sums; class, regression and entity metrics from the records of all samples.

Sums are added over batches and ranks. Metrics that are not sums (F1, correlations) are computed once with
`torchmetrics` from the gathered records. Entities are extracted and compared as in CoNLL's evaluation and `seqeval`
(Tjong Kim Sang and Buchholz, 2000, https://www.clips.uantwerpen.be/conll2000/chunking/conlleval.txt): a tag is `O`,
or the position of a word in an entity (`B`egin, `I`nside; also `E`nd and `S`ingle) and the entity's type, as in
`B-LOC`. The nDCG of rankings is that of Järvelin and Kekäläinen (2002, https://doi.org/10.1145/582415.582418) with
gains of 0 and 1; of equal scores, the earlier candidate ranks first.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from finetune.data.batch import IGNORED
from finetune.runtime.optional import require
from finetune.task.lm_loss.token_loss import cross_entropy_sum


def token_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the summed loss, the number of targets and the number of correctly predicted targets, as scalars."""
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
    """Return exp(loss), or infinity if it overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def class_metrics(labels: Tensor, predicted: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return accuracy, F1 averaged over classes (macro) and over samples (micro), and Matthews' correlation.

    Both are class indices, [samples]. Classes that neither occur nor are predicted do not count in `macro_f1`.
    """
    library = _library("classification")
    targets, classes, num_labels = labels.long(), predicted.long(), max(2, num_classes)
    f1 = library.multiclass_f1_score
    return {
        "accuracy": float((targets == classes).double().mean()),
        "macro_f1": float(f1(classes, targets, num_classes=num_labels, average="macro")),
        "micro_f1": float(f1(classes, targets, num_classes=num_labels, average="micro")),
        "mcc": float(library.multiclass_matthews_corrcoef(classes, targets, num_classes=num_labels)),
    }


def multi_label_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the share of samples whose classes are all correct, and F1 averaged over classes (macro) and all (micro).

    Both are 0 or 1, [samples, classes].
    """
    library = _library("classification")
    targets, classes = labels.long(), predicted.long()
    subset_accuracy = float((targets == classes).all(dim=1).double().mean())
    if targets.shape[1] == 1:  # torchmetrics requires at least two: a duplicated class has the same F1
        targets, classes = targets.expand(-1, 2), classes.expand(-1, 2)
    f1 = partial(library.multilabel_f1_score, classes, targets, num_labels=targets.shape[1])
    scores = {f"{average}_f1": float(f1(average=average)) for average in ("macro", "micro")}
    return {"subset_accuracy": subset_accuracy, **scores}


def regression_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return mean squared error, Pearson and Spearman correlation, averaged over the numbers of a label.

    Both are float64, [samples, numbers]. The correlation is NaN if the labels or predictions are constant.
    """
    library = _library("regression")
    return {
        "mse": float((predicted - labels).square().mean()),
        "pearson": _correlation(library.pearson_corrcoef, labels, predicted),
        "spearman": _correlation(library.spearman_corrcoef, labels, predicted),
    }


def _correlation(correlation: Callable[[Tensor, Tensor], Tensor], labels: Tensor, predicted: Tensor) -> float:
    if len(labels) < 2 or any((values == values[0]).all(dim=0).any() for values in (labels, predicted)):
        return math.nan
    columns = zip(predicted.T.contiguous(), labels.T.contiguous(), strict=True)
    return float(torch.stack([correlation(prediction, target) for prediction, target in columns]).mean())


def _library(part: str) -> ModuleType:
    """Return a module of `torchmetrics.functional`, imported on first use because it takes a second."""
    return require(f"torchmetrics.functional.{part}", extra="dev", purpose="Measuring classes and numbers")


TOP_K = 5
"""The number of most likely classes that count as correct in `top5_accuracy`."""

OUTSIDE = "O"
_TAG = re.compile(r"[BIES]-.+", re.DOTALL)


def are_entity_tags(names: Iterable[str]) -> bool:
    """Return whether the classes are entity tags, at least one of them a `B-` tag."""
    inside = [name for name in names if name != OUTSIDE]
    return all(_TAG.fullmatch(name) for name in inside) and any(name.startswith("B-") for name in inside)


def find_entities(tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the entities of one sentence in order: first and last word, and type.

    An entity starts at `B` and `S`, at a change of type, and at an `I` or `E` that follows `O`, `E` or `S`.
    """
    start, previous = 0, (OUTSIDE, "")
    for number, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, entity_type = tag.partition("-")
        current = prefix, entity_type
        if previous[0] != OUTSIDE and (previous[0] in "ES" or current[0] in "BSO" or previous[1] != current[1]):
            yield start, number - 1, previous[1]
        if current[0] != OUTSIDE and (current[0] in "BS" or previous[0] in "ESO" or previous[1] != current[1]):
            start = number
        previous = current


def entity_metrics(records: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return precision, recall and F1 over the entities of records [words, 3] in order: sample, class, prediction.

    An entity is correct if its words and its type are. A score is 0 if its denominator is 0.
    """
    num_correct = num_predicted = num_true = 0
    for _, words in groupby(records.long().tolist(), key=lambda record: record[0]):
        labels = zip(*((names[label], names[predicted]) for _, label, predicted in words), strict=True)
        true_entities, predicted_entities = (set(find_entities(tags)) for tags in labels)
        num_true += len(true_entities)
        num_predicted += len(predicted_entities)
        num_correct += len(true_entities & predicted_entities)
    return {
        "entity_f1": 2 * num_correct / max(1, num_predicted + num_true),
        "entity_precision": num_correct / max(1, num_predicted),
        "entity_recall": num_correct / max(1, num_true),
    }


RECALL_AT = (1, 5, 10)
CUTOFF = 10
_MAX_SCORES = 1 << 25
"""The maximum number of scores in memory."""


def ranking_metrics(ranks: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the means over the queries, each given by the ranks, from 1, of its relevant candidates.

    >>> ranking_metrics([[1], [3]])["recall_at_1"]
    0.5
    """
    values: list[tuple[float, ...]] = []
    for query_ranks in ranks:
        ordered = np.sort(np.asarray(query_ranks))
        recalls = [float((ordered <= k).mean()) for k in RECALL_AT]
        within = ordered[ordered <= CUTOFF]
        ideal = (1 / np.log2(np.arange(2, min(len(ordered), CUTOFF) + 2))).sum()
        reciprocal = float(1 / within[0]) if len(within) else 0.0
        values.append((*recalls, float((1 / np.log2(within + 1)).sum() / ideal), reciprocal))
    names = [*(f"recall_at_{k}" for k in RECALL_AT), f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}"]
    if not values:
        return dict.fromkeys(names, math.nan)
    return dict(zip(names, np.mean(values, axis=0).tolist(), strict=True))


def ranks_among(queries: Tensor, candidates: Tensor, relevant: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield, for each query, the ranks of its relevant candidates by the dot products of the vectors.

    `queries` are [queries, dimensions], `candidates` [candidates, dimensions]. Works in chunks of queries.
    """
    size = max(1, _MAX_SCORES // max(1, len(candidates)))
    for start in range(0, len(queries), size):
        scores = queries[start : start + size] @ candidates.T
        for query_scores, indices in zip(scores, relevant[start : start + size], strict=True):
            yield ranks_in(query_scores, indices)


def ranks_in(scores: Tensor, indices: Sequence[int]) -> list[int]:
    """Return the ranks of these indices among the scores, [candidates].

    >>> ranks_in(torch.tensor([0.5, 0.9, 0.5]), [2, 1])
    [3, 1]
    """
    positions = torch.as_tensor(list(indices))
    values = scores[positions][:, None]
    is_earlier = torch.arange(len(scores))[None] < positions[:, None]
    is_ranked_higher = (scores[None] > values) | ((scores[None] == values) & is_earlier)
    ranks: list[int] = (is_ranked_higher.sum(dim=1) + 1).tolist()
    return ranks
