"""What an evaluation of image classification amounts to."""

from torch import Tensor

from finetune.task.class_metrics import class_metrics

TOP = 5
"""An answer among the likeliest so many counts for `top5_accuracy`."""


def image_metrics(records: Tensor, *, num_classes: int) -> dict[str, float]:
    """Return `accuracy`, `macro_f1` and, where there are more than TOP classes, `top5_accuracy`.

    `records` are [images, 4]: id, class, likeliest class, and how many classes are likelier than the image's own.
    Macro F1 is the mean over the classes that occur as label or as answer.
    """
    measured = class_metrics(records[:, 1], records[:, 2], num_classes=num_classes)
    found = {name: measured[name] for name in ("accuracy", "macro_f1")}
    if num_classes > TOP:
        found["top5_accuracy"] = (records[:, 3] < TOP).double().mean().item()
    return found
