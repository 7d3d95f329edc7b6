"""The components of a run, passed to the loop as one frozen record; nothing is built here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.config.sections.train import NonFiniteSection
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import SampleVerifier
from finetune.report.profile import Profile
from finetune.report.reporter import Reporter
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Cadence, NeverDue, Progress
from finetune.train.meters import Meters
from finetune.train.plan import StepPlan
from finetune.train.stopping import EarlyStopping, NeverStop, StopSources
from finetune.train.update import Update


class StepTask(Protocol):
    """The methods of a `Task`, or of a wrapper that adds a loss, that a step calls."""

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the step's microbatches with the values that their losses need from all of them. Collective."""

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, detached, the other sums that a step logs; shapes are the same for every batch."""

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return a step's logged metrics, except the loss, from the sums of all ranks."""


class Evaluation(Protocol):
    """Measures the model on the validation rows."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank; reports them. Collective."""


class CheckpointSaving(Protocol):
    """Saves checkpoints of the run."""

    @property
    def has_failed(self) -> bool:
        """Return whether writing has failed permanently, so that the run must stop."""

    def __call__(self, progress: Progress) -> None:
        """Save a checkpoint, possibly in the background; waits for the previous one. Collective."""

    def report_written(self) -> None:
        """Report checkpoints that were written in the background since the last call."""

    def wait_for_writes(self) -> None:
        """Wait for pending writes; raises CheckpointError if one failed and the run must stop. Collective."""


@dataclass(frozen=True)
class TrainingComponents:
    """Everything that the training loop uses."""

    accelerator: Accelerator
    model: nn.Module  # as Accelerate prepared it
    optimizer: torch.optim.Optimizer  # as Accelerate prepared it
    task: StepTask
    groups: Callable[..., Iterator[tuple[Batch, ...]]]  # this rank's microbatches, a group per step, from `first_step`
    plan: StepPlan
    deliveries: SampleVerifier  # compares the expected and the received samples of a step
    row_location: Callable[[int], str]  # of a sample id, for messages
    seed: int
    update: Update
    nonfinite: NonFiniteSection
    scales_loss: bool  # fp16: gradient overflows are expected
    meters: Meters
    reporter: Reporter
    evaluate: Evaluation
    save: CheckpointSaving
    log_due: Cadence
    evaluate_due: Cadence | NeverDue
    save_due: Cadence
    stop_sources: StopSources
    stop_after_steps: int | None
    early_stopping: EarlyStopping | NeverStop
    before_batch: Callable[[Batch], None] = no_op  # called with every batch before its forward pass
    reduces_every_microbatch: bool = False  # over the ranks, if the strategy leaves the choice
    profile: Profile = field(default_factory=Profile)
    counts_ahead: bool = True  # the next group may be requested before the backward passes of a step are done
