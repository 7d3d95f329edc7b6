"""The step plan: the steps and their batches from the training budget, their learning rates, and a description.

The learning rate is a pure function of the steps done: nothing to save, nothing to restore.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

from finetune.config.sections.train import ScalingSection, ScheduleSection, TrainSection
from finetune.registry.optimizers import SCHEDULES


@dataclass(frozen=True)
class Schedule:
    """A warmup from 0 to the peak, then a shape down to `final_fraction` of it.

    The first step has 1/warmup of the peak, so that no step is wasted at a rate of 0.
    """

    name: str  # in the registry
    peak: float
    num_steps: int
    num_warmup_steps: int
    num_decay_steps: int
    final_fraction: float

    def learning_rate(self, steps_done: int) -> float:
        """Return the rate of the step that follows `steps_done` steps."""
        if steps_done < self.num_warmup_steps:
            return self.peak * (steps_done + 1) / self.num_warmup_steps
        shape: float = SCHEDULES.resolve(self.name)(self, steps_done)
        if SCHEDULES[self.name].plugin and not (isinstance(shape, Real) and 0 <= float(shape) < math.inf):
            raise SCHEDULES.refusal(self.name, shape, f"a factor of at least 0, here after {steps_done:,} steps")
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * shape)

    def share_after_warmup(self, steps_done: int) -> float:
        """Return the share of the steps after the warmup that are done."""
        return (steps_done - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)


def constant(schedule: Schedule, steps_done: int) -> float:
    """Return 1."""
    return 1.0


def linear(schedule: Schedule, steps_done: int) -> float:
    """Return a factor on a straight line from 1 right after the warmup to 0 at the end."""
    return 1.0 - schedule.share_after_warmup(steps_done)


def cosine(schedule: Schedule, steps_done: int) -> float:
    """Return a factor on half a cosine from 1 right after the warmup to 0 at the end."""
    return 0.5 * (1.0 + math.cos(math.pi * schedule.share_after_warmup(steps_done)))


def warmup_stable_decay(schedule: Schedule, steps_done: int) -> float:
    """Return 1, and in the last `num_decay_steps` a factor on a straight line to 0."""
    return min(1.0, (schedule.num_steps - steps_done) / max(1, schedule.num_decay_steps))


def build_schedule(section: ScheduleSection, *, peak: float, num_steps: int) -> Schedule:
    """Return the schedule over `num_steps`; fractions of the run become whole steps."""
    warmup = section.warmup_steps
    if warmup is None:
        warmup = round((section.warmup_fraction or 0.0) * num_steps)
    return Schedule(
        name=section.name,
        peak=peak,
        num_steps=num_steps,
        num_warmup_steps=min(warmup, num_steps),
        num_decay_steps=round(section.decay_fraction * num_steps),
        final_fraction=section.final_fraction,
    )


def scaled_learning_rate(learning_rate: float, scaling: ScalingSection | None, *, global_batch_size: int) -> float:
    """Return the peak rate for this global batch: times the ratio to the base batch, or times its square root."""
    if scaling is None:
        return learning_rate
    ratio = global_batch_size / scaling.base_global_batch_size
    return learning_rate * (ratio if scaling.rule == "linear" else math.sqrt(ratio))


@dataclass(frozen=True)
class StepPlan:
    """The number of steps, and the microbatches per step."""

    num_steps: int
    num_positions: int | None  # of one pass over the training data; None if unknown
    global_batch_size: int
    microbatch_size: int
    world: int
    schedule: Schedule
    arithmetic: tuple[str, ...]
    sequence_size: int = 1  # ranks that share each microbatch

    @property
    def num_batches(self) -> int:
        """Return the number of microbatches per step on one rank: the gradient accumulation."""
        return self.num_batches_of(self.microbatch_size)

    def num_batches_of(self, microbatch_size: int) -> int:
        """Return the number of microbatches per step on one rank with this microbatch size."""
        return self.global_batch_size // (microbatch_size * self.world // self.sequence_size)

    def with_microbatch_size(self, size: int) -> "StepPlan":
        """Return the plan with the microbatch size that `auto` was resolved to."""
        changed = replace(self, microbatch_size=size)
        return replace(changed, arithmetic=(f"{_batch_line(changed)} (microbatch_size: auto)", *self.arithmetic[1:]))

    def epoch(self, step: int) -> float | None:
        """Return the number of passes over the training data after `step` steps; None if unknown."""
        return step * self.global_batch_size / self.num_positions if self.num_positions else None

    def num_due(self, every_steps: int | None, *, after: int) -> int:
        """Return how often something that is due every N steps and at the end is due after the first `after` steps."""
        if every_steps is None or after >= self.num_steps:
            return int(after < self.num_steps)
        return -(-self.num_steps // every_steps) - after // every_steps


def make_step_plan(
    section: TrainSection,
    *,
    num_positions: int | None,
    unit: str = "samples",
    world: int,
    steps_for_tokens: Callable[[int], int],
    sequence_size: int = 1,
) -> StepPlan:
    """Return the plan; `steps_for_tokens` returns the number of steps to process a number of tokens.

    `unit` is the plural name of a position's content. If `num_positions` is None, the budget must be in steps.
    `sequence_size` ranks share each microbatch.
    """
    num_steps, budget = _budget(section, num_positions, unit, steps_for_tokens)
    peak = scaled_learning_rate(
        section.learning_rate, section.learning_rate_scaling, global_batch_size=section.global_batch_size
    )
    schedule = build_schedule(section.schedule, peak=peak, num_steps=num_steps)
    rate, scaling = f"{peak:g}", section.learning_rate_scaling
    if scaling is not None:
        ratio = f"{section.global_batch_size} / {scaling.base_global_batch_size}"
        factor = f"({ratio})" if scaling.rule == "linear" else f"sqrt({ratio})"
        rate = f"{peak:g} = {section.learning_rate:g} x {factor}"
    lines = [
        f"budget: {budget}",
        f"learning rate: {rate}, {schedule.name}, {schedule.num_warmup_steps} warmup steps",
    ]
    plan = StepPlan(
        num_steps=num_steps,
        num_positions=num_positions,
        global_batch_size=section.global_batch_size,
        microbatch_size=section.known_microbatch_size,
        world=world,
        schedule=schedule,
        arithmetic=(),
        sequence_size=sequence_size,
    )
    return replace(plan, arithmetic=(_batch_line(plan), *lines))


def _batch_line(plan: StepPlan) -> str:
    processes = f"{plan.world} process{'' if plan.world == 1 else 'es'}"
    if plan.sequence_size > 1:
        processes = f"{processes} / {plan.sequence_size} that share each row"
    return (
        f"batch: {plan.global_batch_size} = {processes} x {plan.microbatch_size} per microbatch x {plan.num_batches} "
        "accumulated"
    )


def _budget(
    section: TrainSection, num_positions: int | None, unit: str, steps_for_tokens: Callable[[int], int]
) -> tuple[int, str]:
    batch = section.global_batch_size
    if section.steps is not None:
        if num_positions is None:
            return section.steps, f"{section.steps} steps x {batch} {unit} of a stream"
        epochs = section.steps * batch / num_positions
        return (
            section.steps,
            f"{section.steps} steps x {batch} / {num_positions:,} {unit} = {epochs:.2f} epoch{'s' * (epochs != 1)}",
        )
    assert num_positions is not None  # the config's rules: a stream has a budget in steps
    if section.epochs is not None:
        epochs = section.epochs
        positions = round(epochs * num_positions)
        num_steps = math.ceil(positions / batch)
        extra = num_steps * batch - positions
        written = f"{epochs:g} epoch{'s' * (epochs != 1)}"
        line = f"{written} x {num_positions:,} {unit} / {batch} = {positions / batch:.2f} -> {num_steps} steps"
        return num_steps, line + (f"; the last one takes {extra} {unit} from the next epoch" if extra else "")
    assert section.tokens is not None  # the config's rules: exactly one budget
    num_steps = steps_for_tokens(section.tokens)
    return num_steps, f"{section.tokens:,} tokens are reached in {num_steps} steps of {batch} {unit}"
