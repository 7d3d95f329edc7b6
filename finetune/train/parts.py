"""The parts of a run, handed to the loop as one frozen record; nothing here is built."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.config.sections.train import NonFiniteSection
from finetune.data.batch import Batch
from finetune.data.sample_checks import SampleVerifier
from finetune.report.profile.window import NullProfile, Profile
from finetune.report.reporter import Reporter
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Cadence, NeverDue, Progress
from finetune.train.early_stopping import EarlyStopping, NeverStop
from finetune.train.meters import Meters
from finetune.train.plan import StepPlan
from finetune.train.stopping import StopSources
from finetune.train.update import Update


class StepTask(Protocol):
    """What a step calls of a `Task`, or of what adds a loss to one."""

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the step's microbatches with what their losses need from all of them. Collective."""

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, detached, the other sums that a step logs, each the same shape for every batch."""

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return what a step logs of the world's sums besides the loss."""


class Evaluation(Protocol):
    """Measures the model on the validation rows."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on every rank; reports them. Collective."""


class CheckpointSaving(Protocol):
    """Keeps the state of the run."""

    @property
    def has_failed(self) -> bool:
        """Return whether writing has failed for good and the run must stop because of it."""

    def __call__(self, progress: Progress) -> None:
        """Take a checkpoint, which may be written in the background; waits for the previous one. Collective."""

    def report_written(self) -> None:
        """Report what has been written in the background since the last call."""

    def wait_for_writes(self) -> None:
        """Wait for what is being written; raises CheckpointError where it failed and the run stops then. Collective."""


@dataclass(frozen=True)
class TrainingComponents:
    """Everything that the loop works with."""

    accelerator: Accelerator
    model: nn.Module  # as Accelerate prepared it
    optimizer: torch.optim.Optimizer  # likewise
    task: StepTask
    groups: Callable[..., Iterator[tuple[Batch, ...]]]  # this rank's microbatches, a group a step, from `first_step`
    plan: StepPlan
    deliveries: SampleVerifier  # of which samples a step must consist, and of which it does
    place: Callable[[int], str]  # where the row of a sample stands, for a message
    seed: int
    update: Update
    nonfinite: NonFiniteSection
    scales_loss: bool  # fp16: a gradient overflow is part of the game
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
    before_batch: Callable[[Batch], None] = no_op  # called with each batch before its forward pass
    reduces_every_microbatch: bool = False  # over the ranks, where the strategy leaves the choice
    profile: Profile = field(default_factory=NullProfile)
    counts_ahead: bool = True  # the next group may be requested before the backward passes of a step are done
