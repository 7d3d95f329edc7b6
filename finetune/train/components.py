"""The components of a run, passed to the loop as one frozen record; nothing is built here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.write.saver import Saver
from finetune.config.sections.train import NonFiniteSection
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import SampleVerifier
from finetune.report.profile import Profile
from finetune.report.reporter import Reporter
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Cadence, NeverDue
from finetune.train.meters import Meters
from finetune.train.plan import StepPlan
from finetune.train.stopping import EarlyStopping, StopSources
from finetune.train.update import Update


class StepTask(Protocol):
    """The methods of a `Task`, or of a wrapper that adds a loss, that a step calls."""

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the step's microbatches with the values that their losses need from all of them. Collective."""

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, detached, the other sums that a step logs; shapes are the same for every batch."""

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return a step's logged metrics, except the loss, from the sums of all ranks."""


Evaluation = Callable[[int], dict[str, float]]
"""Measures the model on the validation rows after a step, and reports the metrics, equal on every rank. Collective."""


@dataclass(frozen=True)
class TrainingComponents:
    """Everything that the training loop uses."""

    accelerator: Accelerator
    model: nn.Module  # as Accelerate prepared it
    optimizer: torch.optim.Optimizer  # as Accelerate prepared it
    task: StepTask
    groups: Callable[..., Iterator[tuple[Batch, ...]]]  # this rank's microbatches, a group per step, from `first_step`
    plan: StepPlan
    sample_verifier: SampleVerifier  # compares the expected and the received samples of a step
    row_location: Callable[[int], str]  # of a sample id, for messages
    seed: int
    update: Update
    nonfinite: NonFiniteSection
    scales_loss: bool  # fp16: gradient overflows are expected
    meters: Meters
    reporter: Reporter
    evaluate: Evaluation
    save: Saver
    log_due: Cadence
    evaluate_due: Cadence | NeverDue
    save_due: Cadence
    stop_sources: StopSources
    stop_after_steps: int | None
    early_stopping: EarlyStopping
    before_batch: Callable[[Batch], None] = no_op  # called with every batch before its forward pass
    reduces_every_microbatch: bool = False  # over the ranks, if the strategy leaves the choice
    profile: Profile = field(default_factory=Profile)
    counts_ahead: bool = True  # the next group may be requested before the backward passes of a step are done
