"""From the budget and the batch to numbers of steps and shapes of groups, with the arithmetic in words."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from finetune.config.sections.train import TrainSection
from finetune.train.schedule import Schedule, build_schedule, scaled_learning_rate


@dataclass(frozen=True)
class Plan:
    """How many steps, and what each is made of."""

    num_steps: int
    num_samples: int  # in the training set
    global_batch_size: int
    microbatch_size: int
    world: int
    schedule: Schedule
    arithmetic: tuple[str, ...]

    @property
    def num_batches(self) -> int:
        """Return the microbatches of one step on one rank: the accumulation."""
        return self.global_batch_size // (self.microbatch_size * self.world)

    def epoch(self, step: int) -> float:
        """Return how many passes over the training set `step` steps are."""
        return step * self.global_batch_size / self.num_samples

    def num_due(self, every_steps: int | None, *, after: int) -> int:
        """Return how often something is due after so many steps, when it is every so many and at the end."""
        if every_steps is None or after >= self.num_steps:
            return int(after < self.num_steps)
        return -(-self.num_steps // every_steps) - after // every_steps


def make_plan(section: TrainSection, *, num_samples: int, world: int, steps_for_tokens: Callable[[int], int]) -> Plan:
    """Return the plan; `steps_for_tokens` answers how many steps it takes to see that many tokens."""
    num_steps, budget = _budget(section, num_samples, steps_for_tokens)
    peak = scaled_learning_rate(
        section.learning_rate, section.learning_rate_scaling, global_batch_size=section.global_batch_size
    )
    schedule = build_schedule(section.schedule, peak=peak, num_steps=num_steps)
    accumulation = section.global_batch_size // (section.microbatch_size * world)
    lines = [
        f"batch: {section.global_batch_size} = {_count(world, 'process', 'processes')} x {section.microbatch_size} "
        f"per microbatch x {accumulation} accumulated",
        f"budget: {budget}",
        f"learning rate: {_rate(section, peak)}, {schedule.name}, {schedule.num_warmup_steps} warmup steps",
    ]
    return Plan(
        num_steps=num_steps,
        num_samples=num_samples,
        global_batch_size=section.global_batch_size,
        microbatch_size=section.microbatch_size,
        world=world,
        schedule=schedule,
        arithmetic=tuple(lines),
    )


def _budget(section: TrainSection, num_samples: int, steps_for_tokens: Callable[[int], int]) -> tuple[int, str]:
    batch = section.global_batch_size
    if section.steps is not None:
        epochs = section.steps * batch / num_samples
        return section.steps, f"{section.steps} steps x {batch} / {num_samples:,} samples = {epochs:.2f} epochs"
    if section.epochs is not None:
        return _epochs(section.epochs, num_samples=num_samples, batch=batch)
    assert section.tokens is not None  # the config's rules: exactly one budget
    num_steps = steps_for_tokens(section.tokens)
    return num_steps, f"{section.tokens:,} tokens are reached in {num_steps} steps of {batch} samples"


def _epochs(epochs: float, *, num_samples: int, batch: int) -> tuple[int, str]:
    samples = round(epochs * num_samples)
    num_steps = math.ceil(samples / batch)
    extra = num_steps * batch - samples
    line = f"{epochs:g} epochs x {num_samples:,} samples / {batch} = {samples / batch:.2f} -> {num_steps} steps"
    return num_steps, line + (f"; the last one takes {extra} samples from the next epoch" if extra else "")


def _rate(section: TrainSection, peak: float) -> str:
    scaling = section.learning_rate_scaling
    if scaling is None:
        return f"{peak:g}"
    ratio = f"{section.global_batch_size} / {scaling.base_global_batch_size}"
    factor = f"({ratio})" if scaling.rule == "linear" else f"sqrt({ratio})"
    return f"{peak:g} = {section.learning_rate:g} x {factor}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
