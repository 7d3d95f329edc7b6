"""A model measured row by row: the loss of each row, and whether it is right. Ranks share the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from finetune.data.features import Features
from finetune.errors import UserError
from finetune.runtime import distributed
from finetune.task.protocol import Task

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RowResults:
    """What a model reaches on each row; all arrays are [rows]."""

    losses: np.ndarray  # float64, summed over the row's targets
    num_targets: np.ndarray  # float64
    num_correct: np.ndarray  # float64: targets with the highest logit; 0 if the task is not a language model
    is_right: np.ndarray  # bool: all targets, the class or classes, the preference, or the order


@torch.no_grad()
def measure_rows(model: Any, task: Task, rows: Sequence[Features]) -> RowResults:
    """Return the results of each row, which is a batch by itself: they depend neither on neighbors nor on ranks.

    Raises UserError if the loss is not a sum over rows. Collective.
    """
    model.eval()

    def measure(row: Features) -> tuple[dict[str, float], Tensor | None]:
        output = task.evaluate_batch(model, task.collate([row]).to(model.device))
        records = None if output.records is None else output.records.cpu()
        return {name: float(value) for name, value in output.sums.items()}, records

    measured = map_over_ranks(measure, rows)
    if "loss_sum" in measured[0][0]:
        losses = [sums["loss_sum"] for sums, _ in measured]
    else:
        of_rows = task.row_losses(torch.cat([records for _, records in measured if records is not None]))
        if of_rows is None:
            raise UserError("--against: this loss (`kto`, `cosent`) is not a sum over rows, so rows have no losses.")
        losses = of_rows.tolist()
    return RowResults(
        np.array(losses),
        np.array([sums.get("num_targets", sums.get("num_pairs", 1.0)) for sums, _ in measured]),
        np.array([sums.get("num_correct", 0.0) for sums, _ in measured]),
        np.array([_is_right(sums, records) for sums, records in measured]),
    )


def map_over_ranks(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the result for every item, in order, on every rank. Each rank computes a share of them. Collective.

    All ranks call the function equally often, so it may be collective.
    """
    world = distributed.world()
    shares = range(distributed.rank(), -(-len(items) // world) * world, world)
    of_ranks = distributed.gather_objects([function(items[min(index, len(items) - 1)]) for index in shares])
    return [of_ranks[index % world][index // world] for index in range(len(items))]


def _is_right(sums: Mapping[str, float], records: Tensor | None) -> bool:
    if "num_correct" in sums:  # with the answer so far given: the greedy answer is then the reference
        return sums["num_correct"] == sums["num_targets"]
    if "log_probability_chosen" in sums:
        return sums["log_probability_chosen"] > sums["log_probability_rejected"]
    if "preference_accuracy" in sums:
        return sums["preference_accuracy"] == sums["num_pairs"]
    if records is None or len(records) == 0:
        return False
    if "num_rows" in sums:  # of reranking: the positive passage, which is the first, has the highest score
        return bool((records[1:, 1] < records[0, 1]).all())
    labels, predicted = records[:, 1:].chunk(2, dim=1)
    return bool((labels == predicted).all())
