"""Batch norms in the course of a run: when a step is over, and when all ranks must hold the same statistics."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from finetune.data.batch import Batch
from finetune.model.batch_norm import Grouped, end_step, settle_batch_norm
from finetune.train.parts import Evaluation


@dataclass(frozen=True)
class Settled:
    """An evaluation before which the norms of all ranks hold the same running statistics."""

    model: nn.Module
    inner: Evaluation

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank. Collective."""
        settle_batch_norm(self.model)
        return self.inner(step)


def each_ended(groups: Iterator[tuple[Batch, ...]], model: nn.Module) -> Iterator[tuple[Batch, ...]]:
    """Yield the groups; when the next one is asked for, the step of the one before is over."""
    if not any(isinstance(module, Grouped) for module in model.modules()):
        yield from groups
        return
    for group in groups:
        yield group
        end_step(model)
