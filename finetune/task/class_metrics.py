"""Metrics of classes and numbers through `torchmetrics`, from what was right and what was predicted for every sample.

They are no sums: the records of all ranks are gathered, and each metric is worked out once, over all of them.
"""

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from finetune.runtime.optional import require


def class_metrics(labels: Tensor, predicted: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return accuracy, F1 averaged over classes (macro) and over samples (micro), and Matthews' correlation.

    Both are indices of classes, [samples]. A class that is neither there nor predicted does not count in `macro_f1`.
    """
    library = _library("classification")
    wanted, found, several = labels.long(), predicted.long(), max(2, num_classes)
    f1 = library.multiclass_f1_score
    return {
        "accuracy": float((wanted == found).double().mean()),
        "macro_f1": float(f1(found, wanted, num_classes=several, average="macro")),
        "micro_f1": float(f1(found, wanted, num_classes=several, average="micro")),
        "mcc": float(library.multiclass_matthews_corrcoef(found, wanted, num_classes=several)),
    }


def multi_label_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the share of samples whose classes are all right, F1 averaged over classes (macro) and over all (micro).

    Both are 0 or 1, [samples, classes].
    """
    library = _library("classification")
    wanted, found = labels.long(), predicted.long()
    subset_accuracy = float((wanted == found).all(dim=1).double().mean())
    if wanted.shape[1] == 1:  # the library wants several: twice the same class has the same F1
        wanted, found = wanted.expand(-1, 2), found.expand(-1, 2)
    scores = {
        f"{average}_f1": float(library.multilabel_f1_score(found, wanted, num_labels=wanted.shape[1], average=average))
        for average in ("macro", "micro")
    }
    return {"subset_accuracy": subset_accuracy, **scores}


def number_metrics(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return the mean squared error, Pearson's and Spearman's correlation; of several numbers, the mean over them.

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
    return float(torch.stack([correlation(found, wanted) for found, wanted in columns]).mean())


def _library(part: str) -> ModuleType:
    """Return a part of `torchmetrics.functional`, which takes a second to import: only evaluations pay for it."""
    return require(f"torchmetrics.functional.{part}", extra="dev", purpose="Measuring classes and numbers")
