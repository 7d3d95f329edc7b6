"""How much of the training's time goes by in waiting for batches."""

MOST_WAITING = 0.1
"""Share of the time from which on a run is told that its loader holds it up."""

WINDOW_STEPS, WINDOW_SECONDS = 20, 10.0
"""The share is taken over at least so many steps and so long, so that one slow batch warns nobody."""


class DataWait:
    """Adds up the waiting of one rank, window after window, and warns once."""

    def __init__(self) -> None:
        self._is_first = True
        self._has_warned = False
        self._begin()

    def add(self, waited_seconds: float, *, of_seconds: float) -> None:
        """Take in a step; the very first waits for the loader to start and does not count."""
        if self._is_first:
            self._is_first = False
            return
        self._num_steps += 1
        self._waited += waited_seconds
        self._seconds += of_seconds

    def warning(self) -> str | None:
        """Return what to try where a window that is full was spent waiting; then a new window begins."""
        if self._has_warned or self._num_steps < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return None
        share, num_steps = self._waited / self._seconds, self._num_steps
        self._begin()
        if share < MOST_WAITING:
            return None
        self._has_warned = True
        return (
            f"{share:.0%} of the last {num_steps} steps was spent waiting for data. `finetune doctor --data "
            "--config JOB.yaml` measures the loader and says what to set (data.num_workers and its neighbours)."
        )

    def _begin(self) -> None:
        self._num_steps = 0
        self._waited = self._seconds = 0.0
