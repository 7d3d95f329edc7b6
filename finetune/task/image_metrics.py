"""What an evaluation of image classification amounts to."""

from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score

TOP = 5
"""An answer among the likeliest so many counts for `top5_accuracy`."""


def image_metrics(records: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return `accuracy`, `macro_f1` and, where there are more than TOP classes, `top5_accuracy`.

    `records` are [images, 4]: id, class, likeliest class, and how many classes are likelier than the image's own.
    Macro F1 is the mean over the classes that occur as label or as answer.
    """
    labels, answers = records[:, 1].long(), records[:, 2].long()
    found = {
        "accuracy": (labels == answers).double().mean().item(),
        "macro_f1": float(multiclass_f1_score(answers, labels, num_classes=num_classes, average="macro")),
    }
    if num_classes > TOP:
        found["top5_accuracy"] = (records[:, 3] < TOP).double().mean().item()
    return found
