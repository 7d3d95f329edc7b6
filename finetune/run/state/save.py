"""Checkpoints of a run: saved when they are due, and reported."""

from collections.abc import Callable

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.write.saver import SavedCheckpoint
from finetune.errors import CheckpointError
from finetune.report.events import CheckpointSaved, Warned
from finetune.report.reporter import Reporter
from finetune.runtime.progress import Progress


def nothing() -> None:
    """Do nothing."""


class ReportingSaver:
    """Takes checkpoints and reports what has become of them."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        reporter: Reporter,
        on_saved: Callable[[str], None],
        *,
        before: Callable[[], None] = nothing,
    ) -> None:
        """`on_saved` is told the path of what has been written: for the status file.

        `before` is called on every rank before the state is looked at, and may be collective.
        """
        self._before = before
        self._saver = checkpointer.saver
        self._stops = checkpointer.stops_on_failure
        self._reporter = reporter
        self._on_saved = on_saved
        self._step = 0  # of the last that was begun
        self._told: object = None

    def __call__(self, progress: Progress) -> None:
        """Take a checkpoint of this progress, which may be written behind; waits for the one before. Collective.

        Raises CheckpointError where that or this has failed and the run is to stop then; NonFiniteError likewise,
        whatever is asked for.
        """
        self.wait_for_writes()
        self._before()
        self._step = progress.step
        try:
            self._saver.begin(progress.step, progress=progress.state_dict())
        except CheckpointError as error:
            if self._stops:
                raise
            self._warn(error)
        if self._saver.outcome() is not None:  # it has been written already, in the foreground
            self.wait_for_writes()

    @property
    def has_failed(self) -> bool:
        """Tell whether writing has been given up and the run is to stop because of it."""
        outcome = self._saver.outcome()
        goes_on = isinstance(outcome, CheckpointError) and not self._stops
        return isinstance(outcome, BaseException) and not goes_on

    def report_written(self) -> None:
        """Report what has been written behind since the last time."""
        for step, note in self._saver.notes():
            self._reporter(Warned(step, note))
        outcome = self._saver.outcome()
        if outcome is None or outcome is self._told:
            return
        self._told = outcome
        if isinstance(outcome, SavedCheckpoint):
            path = str(outcome.path)
            times = {"seconds": outcome.seconds, "stall_seconds": outcome.stall_seconds}
            self._reporter(CheckpointSaved(outcome.step, path, outcome.size_bytes, **times))
            self._on_saved(path)
        if isinstance(outcome, CheckpointError) and not self._stops:
            self._warn(outcome)

    def wait_for_writes(self) -> None:
        """Wait for what is being written; raises CheckpointError where it failed and the run stops then. Collective."""
        self._saver.wait()
        self.report_written()
        try:
            self._saver.finish()
        except CheckpointError as error:
            if self._stops:
                raise
            if not isinstance(self._told, CheckpointError):  # it has failed on another rank alone
                self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        self._reporter(Warned(self._step, f"{error} Training goes on, and the next save that is due tries again."))
