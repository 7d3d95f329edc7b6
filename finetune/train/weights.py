"""Which weights are measured and exported: those that learn, or an average of them that the optimizer keeps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from finetune.checkpoint.record import PARAMETER, TensorRecord
from finetune.checkpoint.state import StateAccess
from finetune.config.sections.train import TrainSection
from finetune.runtime.average import STATE
from finetune.train.parts import Evaluation
from finetune.train.schedule_free import FAST, average_of

Formula = Callable[[Tensor, Tensor], Tensor]
"""From a parameter and a tensor of its optimizer state, both flat, to the value that is measured and exported."""


class Weights(Protocol):
    """The weights of a run."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Have the model hold, within, the weights that are to be measured and exported. Collective."""


class LiveWeights:
    """The weights that learn are those that count."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()


@dataclass(frozen=True)
class AveragedWeights:
    """The average that the optimizer keeps takes the place of the weights, which come back bit for bit."""

    access: StateAccess
    key: str  # of the optimizer's state that the formula reads
    formula: Formula

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Have the model hold the average within, and needs room for one more copy of what this rank trains.

        Parameters without state, which have not been updated yet, are their own average. After an error nothing is put
        back, since that would wait for other ranks. Collective.
        """
        kept = self._replace()
        yield
        self._write(kept)

    @torch.no_grad()
    def _replace(self) -> dict[TensorRecord, Tensor]:
        """Write the average and return what was there before. Collective."""
        self.access.begin_reading()
        records = {(record.name, record.key): record for record in self.access.records()}
        pairs = {records[name, PARAMETER]: record for (name, key), record in records.items() if key == self.key}
        kept = {parameter: self.access.read(parameter).clone() for parameter in pairs}
        self._write({each: self.formula(kept[each], self.access.read(state)) for each, state in pairs.items()})
        return kept

    def _write(self, values: Mapping[TensorRecord, Tensor]) -> None:
        self.access.begin_reading()  # an evaluation may have left modules gathered
        for record, value in values.items():
            self.access.write(record, value)
        self.access.finish_writing()


@dataclass(frozen=True)
class EvaluationOf:
    """An evaluation of the weights that count."""

    weights: Weights
    evaluate: Evaluation

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank. Collective."""
        with self.weights.evaluated():
            return self.evaluate(step)


def averaging(section: TrainSection) -> tuple[str, Formula] | None:
    """Return what the average is read from and how; None where the weights that learn are those that count."""
    if section.optimizer.name == "schedule_free_adamw":
        beta = section.optimizer.betas[0]
        return FAST, lambda weights, fast: average_of(weights, fast, beta=beta)
    if section.average is not None:
        return STATE, lambda _, average: average
    return None
