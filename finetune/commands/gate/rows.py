"""A model measured row by row: the loss of each row, and whether it is right."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.data.features import Features
from finetune.errors import UserError
from finetune.task.protocol import EvaluationOutput, Task


@dataclass(frozen=True)
class RowResults:
    """What a model reaches on each row; all arrays are [rows]."""

    losses: np.ndarray  # float64, summed over the row's targets
    num_targets: np.ndarray  # float64
    num_correct: np.ndarray  # float64: targets with the highest logit; 0 if the task is not a language model
    is_right: np.ndarray  # bool: all targets, the class or classes, or the preference


@torch.no_grad()
def measure_rows(model: Any, task: Task, rows: Iterable[Features], *, device: torch.device) -> RowResults:
    """Return the results of each row, which is a batch by itself: they do not depend on its neighbors.

    Raises UserError if the loss is not a sum over rows.
    """
    columns: list[tuple[float, float, float, bool]] = []
    model.eval()
    for features in rows:
        output = task.evaluate_batch(model, task.collate([features]).to(device))
        sums = {name: float(value) for name, value in output.sums.items()}
        if "loss_sum" not in sums:
            raise UserError("--against: task.preference.loss: `kto` is not a sum over rows, so rows have no losses.")
        num_targets = sums.get("num_targets", sums.get("num_pairs", 1.0))
        columns.append((sums["loss_sum"], num_targets, sums.get("num_correct", 0.0), _is_right(output, sums)))
    return RowResults(*(np.array(column) for column in zip(*columns, strict=True)))


def _is_right(output: EvaluationOutput, sums: Mapping[str, float]) -> bool:
    if "num_correct" in sums:  # with the answer so far given: the greedy answer is then the reference
        return sums["num_correct"] == sums["num_targets"]
    if "log_probability_chosen" in sums:
        return sums["log_probability_chosen"] > sums["log_probability_rejected"]
    if output.records is None:
        return False
    labels, predicted = output.records[:, 1:].chunk(2, dim=1)
    return bool((labels == predicted).all())
