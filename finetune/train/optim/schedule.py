"""The learning rate as a pure function of the steps done: nothing to save, nothing to restore."""

import math
from dataclasses import dataclass

from finetune.config.sections.train import ScalingSection, ScheduleSection
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
