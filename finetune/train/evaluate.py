"""Evaluation: exact sums over the validation rows, each counted once with any number of ranks.

Evaluation and export use the trained weights, or their average if the optimizer keeps one.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from finetune.checkpoint.format.tensor_file import PARAMETER, TensorRecord
from finetune.checkpoint.sharding.access import StateAccess
from finetune.config.sections.train import TrainSection
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import require_intact
from finetune.data.token_cache.store import TokenCache
from finetune.registry.optimizers import OPTIMIZERS
from finetune.report.events import Answered, Evaluated
from finetune.report.reporter import Reporter
from finetune.runtime import distributed
from finetune.runtime.parameters import AVERAGE
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.task.generation import GenerationEvaluator
from finetune.task.protocol import Task
from finetune.train.meters import sum_over_ranks

Formula = Callable[[Tensor, Tensor], Tensor]
"""Computes the evaluated and exported value from a parameter and a tensor of its optimizer state, both flat."""


@dataclass(frozen=True)
class AveragedWeights:
    """The optimizer's average of the weights, which temporarily replaces them; they are restored bitwise."""

    access: StateAccess
    key: str  # of the optimizer state that the formula reads
    formula: Formula

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the average in; needs memory for another copy of this rank's trained parameters.

        Parameters without state, which have not been updated yet, are their own average. After an error the weights are
        not restored, since that would wait for other ranks. Collective.
        """
        self.access.begin_reading()
        records = {(record.name, record.key): record for record in self.access.records()}
        pairs = {records[name, PARAMETER]: record for (name, key), record in records.items() if key == self.key}
        with torch.no_grad():
            original = {parameter: self.access.read(parameter).clone() for parameter in pairs}
            averages = {
                parameter: self.formula(original[parameter], self.access.read(state))
                for parameter, state in pairs.items()
            }
        self._write(averages)
        del averages  # the memory is needed while the average is evaluated
        yield
        self._write(original)

    def _write(self, values: Mapping[TensorRecord, Tensor]) -> None:
        self.access.begin_reading()  # an evaluation may have left modules gathered
        for record, value in values.items():
            self.access.write(record, value)
        self.access.finish_writing()


def average_formula(section: TrainSection) -> tuple[str, Formula] | None:
    """Return the optimizer-state key and formula of the average; None if the trained weights are evaluated."""
    fast_key = OPTIMIZERS[section.optimizer.name].fast_key
    if fast_key is not None:
        beta = section.optimizer.betas[0]
        # the average x of the weights y and the fast sequence z, where y = beta * x + (1 - beta) * z
        return fast_key, lambda weights, fast: weights.lerp(fast, 1.0 - 1.0 / beta)
    if section.average is not None:
        return AVERAGE, lambda _, average: average
    return None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model on all validation rows, and on generated answers if configured."""

    task: Task
    model: nn.Module  # as Accelerate prepared it
    batches: Iterable[tuple[Batch, ...]]  # one per group, on the device; ranks without remaining rows get dummy batches
    rows: TokenCache
    reporter: Reporter
    answers: GenerationEvaluator | None

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank, and report them. Collective."""
        started = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        totals: dict[str, Tensor] = {}
        records: list[Tensor] = []
        with torch.no_grad():
            for (batch,) in self.batches:  # every rank runs the same number of forward passes
                fault_point("evaluate", step=step)
                require_intact(self.rows, batch.sample_ids, batch.checksums)
                measured = self.task.evaluate_batch(self.model, batch)
                for name, value in measured.sums.items():
                    wide = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
                    wide = torch.zeros_like(wide) if batch.is_copy else wide
                    totals[name] = totals[name] + wide if name in totals else wide
                if measured.records is not None and not batch.is_copy:
                    records.append(measured.records.detach())
            metrics = dict(self.task.metrics(sum_over_ranks(totals), _gather_records(records)))
            if self.answers is not None:
                answered = self.answers.generate_all(self.model, step=step)
                with distributed.rank_0_works_alone():  # a user's metric may take long
                    scores = self.answers.score(answered) if distributed.is_main() else {}
                metrics |= distributed.broadcast_object(scores)
                for answer in answered[: self.answers.section.show]:
                    self.reporter(Answered(step, answer.prompt, answer.answer, answer.reference))
        self.model.train(was_training)
        self.reporter(Evaluated(step, metrics, len(self.rows), time.perf_counter() - started))
        return metrics


def _gather_records(records: Sequence[Tensor]) -> Tensor | None:
    """Return the records of all ranks ordered by sample, float64 on the CPU; None if there are none. Collective."""
    own = torch.cat(list(records)).to("cpu", torch.float64).numpy() if records else None
    everyone = [records for records in distributed.gather_objects(own) if records is not None]
    if not everyone:
        return None
    combined = np.concatenate(everyone)
    return torch.from_numpy(combined[np.argsort(combined[:, 0], kind="stable")])
