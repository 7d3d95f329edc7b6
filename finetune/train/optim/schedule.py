"""The learning rate as a pure function of the steps done: nothing to save, nothing to restore."""

import math
from dataclasses import dataclass
from typing import Literal

from finetune.config.sections.train import ScalingSection, ScheduleSection


@dataclass(frozen=True)
class Schedule:
    """A warmup from 0 to the peak, then a shape down to `final_fraction` of it.

    The first step has 1/warmup of the peak, so that no step is wasted at a rate of 0.
    """

    name: Literal["constant", "linear", "cosine", "warmup_stable_decay"]
    peak: float
    num_steps: int
    num_warmup_steps: int
    num_decay_steps: int
    final_fraction: float

    def learning_rate(self, steps_done: int) -> float:
        """Return the rate of the step that follows `steps_done` steps."""
        if steps_done < self.num_warmup_steps:
            return self.peak * (steps_done + 1) / self.num_warmup_steps
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * self._shape(steps_done))

    def _shape(self, steps_done: int) -> float:
        """Return a factor that falls from 1 right after the warmup towards 0 at the end."""
        if self.name == "constant":
            return 1.0
        if self.name == "warmup_stable_decay":
            return min(1.0, (self.num_steps - steps_done) / max(1, self.num_decay_steps))
        share = (steps_done - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        return 1.0 - share if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


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
