"""One optimizer step.

The number of targets over all ranks is known before the first backward pass, so gradients are never rescaled afterwards
and the result does not depend on how the global batch is split into ranks and microbatches.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.write.saver import Saver
from finetune.config.sections.train import NonFiniteSection
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import SampleVerifier, extend_digest, join_uint64, split_uint64
from finetune.errors import NonFiniteError, TrainingError
from finetune.report.events import StepSkipped
from finetune.report.phases import BACKWARD, DATA, FORWARD, OPTIMIZER
from finetune.report.profile import Profile
from finetune.report.reporter import Reporter
from finetune.runtime import distributed, seeds
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import tensor_group
from finetune.runtime.parameters import is_finite
from finetune.runtime.progress import Cadence, NeverDue, Progress
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.strategy.gradient_sync import accumulate_gradients
from finetune.train.meters import Meters, StepRecord
from finetune.train.optim.optimizers import begin_step
from finetune.train.plan import StepPlan
from finetune.train.stopping import EarlyStopping, StopRequest, StopSources, stop_request_of
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


LOSS_SCALE, NON_FINITE = "loss scale", "non-finite"
MAX_NAMED_ROWS = 16
"""Maximum number of rows with a non-finite loss to name in a message."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step's group and flags, reduced over all ranks."""

    num_targets: int
    num_tokens: int
    samples: int  # the mark of the samples (`data/token_cache/integrity.py`)
    stop_request: StopRequest
    has_news: bool  # some rank has read a skipped step
    is_slow: bool = False  # on some rank: handle a stop request now, not one step later


def take_step(
    components: TrainingComponents,
    group: tuple[Batch, ...],
    counts: StepCounts,
    *,
    progress: Progress,
    started: float,
    data_seconds: float,
    before_last_backward: Callable[[], None] = no_op,
) -> StepRecord:
    """Take the step after `progress.step` steps, or skip it. Collective.

    `started` is its start time by `time.perf_counter`, `data_seconds` the time spent waiting for its batches.
    `before_last_backward` is called when the last forward pass is done, or queued on the device.
    """
    seeds.seed_everything(components.seed, "step", progress.step, distributed.rank() // tensor_group().size)
    learning_rate = components.plan.schedule.learning_rate(progress.step)
    begin_step(components.optimizer, step=progress.step, learning_rate=learning_rate)
    losses, others = forward_backward(
        components, group, num_targets=counts.num_targets, step=progress.step, before_last=before_last_backward
    )
    norm, is_taken = update_weights(components, progress)
    return StepRecord(
        number=progress.step + 1,
        losses=losses,
        gradient_norm=norm,
        is_taken=is_taken,
        sample_ids=tuple(batch.sample_ids for batch in group),
        learning_rate=learning_rate,
        num_targets=counts.num_targets,
        num_tokens=counts.num_tokens,
        samples_sha256=extend_digest(progress.samples_sha256, counts.samples),
        epoch=components.plan.epoch(progress.step),
        seconds=time.perf_counter() - started,
        data_seconds=data_seconds,
        sums=others,
    )


def start_step_counts(
    components: TrainingComponents, group: tuple[Batch, ...], *, step: int, is_slow: bool = False
) -> Callable[[], StepCounts]:
    """Start one all-reduce of the group's counts and the stop requests; return a function that waits for the sums.

    The function raises TrainingError if the samples are damaged or belong to another step. Both are collective.
    """
    delivery = components.sample_verifier.received(group)
    wait_for_sums = distributed.start_sum_counts(
        [
            sum(batch.num_targets for batch in group),
            sum(batch.num_tokens for batch in group),
            *split_uint64(delivery.checksum),
            len(delivery.damaged),
            int(components.update.has_news),
            int(is_slow),
            *components.stop_sources.counts(),
        ]
    )

    def wait() -> StepCounts:
        num_targets, num_tokens, low, high, num_damaged, num_news, num_slow, *stop_counts = wait_for_sums()
        if num_damaged:  # the damaged samples of all ranks are named, and their cache is set aside
            gathered = distributed.gather_objects(
                components.sample_verifier.explain(delivery.damaged) if delivery.damaged else ()
            )
            lines = dict.fromkeys(line for of_rank in gathered for line in of_rank)
            raise TrainingError(f"step {step + 1} is not taken because its data is damaged:\n" + "\n".join(lines))
        samples = join_uint64(low, high)
        if samples != components.sample_verifier.expected(step):
            raise TrainingError(
                f"the samples of step {step + 1} differ from the data order's, because of a bug in finetune or a data "
                "loader. The step was not taken. Please report it."
            )
        request = stop_request_of(stop_counts)
        return StepCounts(num_targets, num_tokens, samples, request, has_news=num_news > 0, is_slow=num_slow > 0)

    return wait


def forward_backward(
    components: TrainingComponents,
    group: tuple[Batch, ...],
    *,
    num_targets: int,
    step: int,
    before_last: Callable[[], None] = no_op,
    completes_step: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulate the gradient of the mean loss over the targets of all ranks. Collective.

    Returns the summed loss of every microbatch, [microbatches], and the task's other sums over all microbatches.
    Where the group does not complete the step, DeepSpeed does not update the weights in its last backward pass.
    """
    accelerator, losses = components.accelerator, []
    accumulate = partial(
        accumulate_gradients, accelerator, components.model, reduces=components.reduces_every_microbatch
    )
    others: dict[str, Tensor] = {}
    # Every backend averages over ranks; ranks that share weights count as one.
    scale = accelerator.num_processes / tensor_group().size / max(1, num_targets)
    with components.profile.phase(FORWARD):
        microbatches = components.task.prepare_step(components.model, group)
    for number, batch in enumerate(microbatches):
        is_last = number == len(group) - 1
        accelerator.sync_gradients = is_last and completes_step
        with nullcontext() if is_last else accumulate():
            with components.profile.phase(FORWARD):
                components.before_batch(batch)
                sums = dict(components.task.loss_sums(components.model, batch))
            loss_sum = sums.pop("loss_sum")
            fault_point("forward", step=step, tensor=loss_sum)
            if is_last:
                before_last()
            with components.profile.phase(BACKWARD):
                components.update.backward(loss_sum * scale)
            fault_point("backward", step=step)
        losses.append(_counted(loss_sum, batch))
        others = {name: others.get(name, 0.0) + _counted(value, batch) for name, value in sums.items()}
    return torch.stack(losses), others


def _counted(value: Tensor, batch: Batch) -> Tensor:
    """Return the value without its graph, or zeros where another rank counts the batch."""
    return torch.zeros_like(value) if batch.is_copy else value.detach()


def update_weights(components: TrainingComponents, progress: Progress) -> tuple[Tensor, bool | None]:
    """Clip the accumulated gradient, update the weights and drop the gradient, or skip the step. Collective.

    Returns the gradient norm before clipping, and whether the step was taken; None: if the norm is finite.
    """
    with components.profile.phase(OPTIMIZER):
        gradient_norm = components.update.clip()
    fault_point("update.before", step=progress.step)
    skips = components.nonfinite.action == "skip"
    num_allowed = components.nonfinite.max_skips - progress.num_nonfinite_skips if skips else 0
    with components.profile.phase(OPTIMIZER):
        is_taken = components.update(gradient_norm, num_allowed=num_allowed)
    fault_point("update.after", step=progress.step)
    return gradient_norm, is_taken


def record_skipped_step(components: TrainingComponents, progress: Progress, record: StepRecord) -> None:
    """Count and report the skipped step; raises NonFiniteError as configured. Collective."""
    is_loss_finite = distributed.sum_counts([int(not is_finite(record.losses))]) == [0]
    reason = LOSS_SCALE if components.scales_loss and is_loss_finite else NON_FINITE
    # The ids in microbatches with a non-finite loss, or all ids if every loss is finite.
    losses = record.losses.tolist()
    nonfinite = [i for ids, loss in zip(record.sample_ids, losses, strict=True) if not math.isfinite(loss) for i in ids]
    gathered = distributed.gather_objects((nonfinite, [i for ids in record.sample_ids for i in ids]))
    of_ranks = [i for ids, _ in gathered for i in ids] or [i for _, ids in gathered for i in ids]
    sample_ids = tuple(sorted(set(of_ranks)))  # ranks that share a row report the same ids
    locations = [components.row_location(sample_id) for sample_id in sample_ids[:MAX_NAMED_ROWS]]
    more = len(sample_ids) - len(locations)
    rows = "; ".join([*locations, f"and {more} more"] if more else locations)
    if reason == LOSS_SCALE:
        progress.num_scale_skips += 1
    else:
        problem = (
            f"the loss or gradient of step {record.number} is not finite. Training rows: {rows}. "
            f"{components.update.nonfinite_effect}"
        )
        if components.nonfinite.action == "stop":
            raise NonFiniteError(
                f"{problem} Inspect these rows, lower train.learning_rate, or set train.nonfinite.action: skip."
            )
        if progress.num_nonfinite_skips >= components.nonfinite.max_skips:
            limit = f"{components.nonfinite.max_skips} steps have already been skipped (train.nonfinite.max_skips)"
            raise NonFiniteError(f"{problem} {limit}. Inspect these rows, or lower train.learning_rate.")
        progress.num_nonfinite_skips += 1
    components.reporter(StepSkipped(record.number, reason, sample_ids, rows))


SLOW_SECONDS = 1.0
"""From here on a step is not counted in advance."""


class PrefetchedSteps:
    """Hands out the groups in the order of the steps; the next one is counted while a step ends.

    The counts go round a ring of all ranks, some 50 microseconds each: with 1,000 ranks 60 to 100 ms, in which a short
    step could be taken. So they are started before the last backward pass. A stop requested after that takes effect one
    step later, which is why slow steps, whose device hides the ring anyway, are not counted in advance.
    """

    def __init__(self, components: TrainingComponents, *, first_step: int) -> None:
        self._components = components
        self._groups = components.groups(first_step=first_step)
        self._first_step = first_step
        self._taken_at = time.perf_counter()
        self._next: tuple[tuple[Batch, ...], float, Callable[[], StepCounts]] | None = None  # under way

    def take(self, step: int) -> tuple[tuple[Batch, ...], StepCounts, float]:
        """Return the group of this step, which is counted now unless that was started. Collective.

        These are this rank's microbatches, the counts over all ranks, and the seconds for which this rank waited for
        its microbatches. Raises TrainingError as `start_step_counts` says.
        """
        if self._next is None:
            batches, data_seconds = self._fetch()
            fault_point("data", step=step)
            wait = self._start_count(batches, step=step)
        else:
            (batches, data_seconds, wait), self._next = self._next, None
            fault_point("data", step=step)
        self._taken_at = time.perf_counter()
        return batches, wait(), data_seconds

    def start_next_count(self, step: int, *, counts: StepCounts) -> None:
        """Start to count the group of this step, unless it may never be taken, or steps are slow. Collective.

        `counts` belong to the step before it. The first step of a start is over when the second group is requested,
        and an evaluation may end the run: after either, nothing is started.
        """
        components = self._components
        may_be_last = (
            step >= components.plan.num_steps
            or step == components.stop_after_steps
            or components.evaluate_due.due(step)
        )
        if components.counts_ahead and not counts.is_slow and not may_be_last and step > self._first_step + 1:
            batches, data_seconds = self._fetch()
            self._next = batches, data_seconds, self._start_count(batches, step=step)

    def _fetch(self) -> tuple[tuple[Batch, ...], float]:
        started = time.perf_counter()
        with self._components.profile.phase(DATA):
            batches = next(self._groups)
        return batches, time.perf_counter() - started

    def _start_count(self, batches: tuple[Batch, ...], *, step: int) -> Callable[[], StepCounts]:
        is_slow = time.perf_counter() - self._taken_at > SLOW_SECONDS
        return start_step_counts(self._components, batches, step=step, is_slow=is_slow)
