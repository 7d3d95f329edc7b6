"""The groups of the steps, each with its counts over all ranks; the next one is counted while a step ends.

The counts go round a ring of all ranks, some 50 microseconds each: with 1,000 ranks 60 to 100 ms, in which a short step
could be taken. So they are started before the last backward pass. A stop requested after that takes effect one step
later, which is why slow steps, whose device hides the ring anyway, are not counted in advance.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.batch import Batch
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.train.parts import TrainingComponents
from finetune.train.step import StepCounts, start_step_counts

SLOW_SECONDS = 1.0
"""From here on a step is not counted in advance."""


@dataclass(frozen=True)
class CountedGroup:
    """The microbatches of one step on this rank, and the counts of the group over all ranks."""

    batches: tuple[Batch, ...]
    counts: StepCounts
    data_seconds: float  # for which this rank waited for the batches


class CountedGroups:
    """Hands out the groups in the order of the steps."""

    def __init__(self, parts: TrainingComponents, *, first_step: int) -> None:
        self._parts = parts
        self._groups = parts.groups(first_step=first_step)
        self._first_step = first_step
        self._taken_at = time.perf_counter()
        self._next: _StartedGroup | None = None

    def take(self, step: int) -> CountedGroup:
        """Return the group of this step, which is counted now unless that was started. Collective.

        Raises TrainingError as `start_step_counts` says.
        """
        if self._next is None:
            batches, data_seconds = self._fetch()
            fault_point("data", step=step)
            started = self._start(batches, data_seconds, step=step)
        else:
            started, self._next = self._next, None
            fault_point("data", step=step)
        self._taken_at = time.perf_counter()
        return CountedGroup(started.batches, started.wait(), started.data_seconds)

    def start_next_count(self, step: int, *, counts: StepCounts) -> None:
        """Start to count the group of this step, unless it may never be taken, or steps are slow. Collective.

        `counts` are those of the step before it. The first step of a start is over when the second group is requested,
        and an evaluation may end the run: after either, nothing is started.
        """
        parts = self._parts
        may_be_last = step >= parts.plan.num_steps or step == parts.stop_after_steps or parts.evaluate_due.due(step)
        if parts.counts_ahead and not counts.is_slow and not may_be_last and step > self._first_step + 1:
            self._next = self._start(*self._fetch(), step=step)

    def _fetch(self) -> tuple[tuple[Batch, ...], float]:
        started = time.perf_counter()
        batches = next(self._groups)
        return batches, time.perf_counter() - started

    def _start(self, batches: tuple[Batch, ...], data_seconds: float, *, step: int) -> "_StartedGroup":
        is_slow = time.perf_counter() - self._taken_at > SLOW_SECONDS
        wait = start_step_counts(self._parts, batches, step=step, is_slow=is_slow)
        return _StartedGroup(batches, data_seconds, wait)


@dataclass(frozen=True)
class _StartedGroup:
    """A group whose counts are under way."""

    batches: tuple[Batch, ...]
    data_seconds: float
    wait: Callable[[], StepCounts]
