"""How fast the run is and when it will be done."""

from collections import deque
from statistics import median

from finetune.report.events import StepTaken


class ThroughputMeter:
    """Tokens per second and time left over a window of recent steps.

    Medians, so that one step held up by a checkpoint, an evaluation or a compilation does not sway them.
    """

    def __init__(self, num_steps: int, *, window: int = 50, unit: str = "tokens") -> None:
        """`unit` is what a sample is counted in."""
        self.unit = unit
        self._num_steps = num_steps
        self._recent: deque[StepTaken] = deque(maxlen=window)
        self._waited = self._seconds = 0.0  # since the last log point

    def add(self, event: StepTaken) -> None:
        """Take note of a step."""
        self._recent.append(event)
        self._waited += event.data_seconds
        self._seconds += event.seconds

    @property
    def data_share(self) -> float:
        """Return the share of the time since the last log point that was spent waiting for batches."""
        return self._waited / self._seconds if self._seconds > 0 else 0.0

    def pass_log_point(self) -> None:
        """Begin to add up the waiting anew: the share has been logged."""
        self._waited = self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the window; 0 before the first step."""
        rates = [event.num_tokens / event.seconds for event in self._recent if event.seconds > 0]
        return median(rates) if rates else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return the time that the remaining steps need at the median pace; None before the first step."""
        if not self._recent:
            return None
        steps_left = max(self._num_steps - self._recent[-1].step, 0)
        return steps_left * median(event.seconds for event in self._recent)
