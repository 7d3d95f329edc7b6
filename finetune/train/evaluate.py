"""Evaluation: exact sums over the validation rows, each counted once whatever the number of ranks."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.delivery import require_intact
from finetune.data.prepared.store import PreparedSet
from finetune.report.events import Answered, Evaluated
from finetune.report.reporter import Reporter
from finetune.runtime import ranks
from finetune.runtime.waypoints import reach
from finetune.task.protocol import Task
from finetune.train.answer import Answers
from finetune.train.meters import numbers


class NoEvaluation:
    """There are no validation rows; it is never due and measures nothing."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return no metrics."""
        return {}


@dataclass(frozen=True)
class Evaluator:
    """Measures the model on every validation row, and on its answers where they are asked for."""

    task: Task
    model: nn.Module  # as Accelerate prepared it
    loader: Iterable[Batch]  # prepared; ranks without a row left get filler batches
    rows: PreparedSet
    reporter: Reporter
    answers: Answers | None

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank, and report them. Collective."""
        started = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            sums, records = self._measure(step)
            metrics = dict(self.task.metrics(numbers(sums), _gathered(records)))
            if self.answers is not None:
                answered = self.answers.collect(self.model, step=step)
                metrics |= ranks.broadcast_object(self.answers.score(answered) if ranks.is_main() else {})
                for answer in answered[: self.answers.section.show]:
                    self.reporter(Answered(step, answer.prompt, answer.answer, answer.reference))
        self.model.train(was_training)
        self.reporter(Evaluated(step, metrics, len(self.rows), time.perf_counter() - started))
        return metrics

    def _measure(self, step: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return this rank's sums and records; every rank runs the same number of forward passes."""
        totals: dict[str, Tensor] = {}
        records: list[Tensor] = []
        for batch in self.loader:
            reach("evaluate", step=step)
            require_intact(self.rows, batch)
            measured = self.task.measure(self.model, batch)
            for name, value in measured.sums.items():
                wide = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
                totals[name] = totals[name] + wide if name in totals else wide
            if measured.records is not None:
                records.append(measured.records.detach())
        return totals, records


def _gathered(records: Sequence[Tensor]) -> Tensor | None:
    """Return the records of all ranks by sample, float64 on the CPU; None where the task keeps none. Collective."""
    own = torch.cat(list(records)).to("cpu", torch.float64).numpy() if records else None
    everyone = [each for each in ranks.gather_objects(own) if each is not None]
    if not everyone:
        return None
    together = np.concatenate(everyone)
    return torch.from_numpy(together[np.argsort(together[:, 0], kind="stable")])
