"""Checkpoints of a run: saved when they are due, and reported."""

from collections.abc import Callable

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.write.saver import SavedCheckpoint
from finetune.errors import CheckpointError
from finetune.report.events import CheckpointSaved, Warned
from finetune.report.reporter import Reporter
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Progress


class ReportingSaver:
    """Takes checkpoints and reports the outcome of each."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        reporter: Reporter,
        on_saved: Callable[[str], None],
        *,
        before: Callable[[], None] = no_op,
    ) -> None:
        """`on_saved` is called with the path of each written checkpoint, for the status file.

        `before` is called on every rank before the state is read, and may be collective.
        """
        self._before = before
        self._saver = checkpointer.saver
        self._stops = checkpointer.stops_on_failure
        self._reporter = reporter
        self._on_saved = on_saved
        self._step = 0  # of the last one that was started
        self._reported: object = None

    def __call__(self, progress: Progress) -> None:
        """Take a checkpoint of this progress, which may be written in the background; wait for the one before.

        Raises CheckpointError where either has failed and the run stops on failures; NonFiniteError in any case.
        Collective.
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
        if self._saver.outcome() is not None:  # it was written in the foreground
            self.wait_for_writes()

    @property
    def has_failed(self) -> bool:
        """Return whether a save has failed and the run stops because of it."""
        outcome = self._saver.outcome()
        goes_on = isinstance(outcome, CheckpointError) and not self._stops
        return isinstance(outcome, BaseException) and not goes_on

    def report_written(self) -> None:
        """Report what has been written in the background since the last call."""
        for step, note in self._saver.notes():
            self._reporter(Warned(step, note))
        outcome = self._saver.outcome()
        if outcome is None or outcome is self._reported:
            return
        self._reported = outcome
        if isinstance(outcome, SavedCheckpoint):
            path = str(outcome.path)
            times = {"seconds": outcome.seconds, "stall_seconds": outcome.stall_seconds}
            self._reporter(CheckpointSaved(outcome.step, path, outcome.size_bytes, **times))
            self._on_saved(path)
        if isinstance(outcome, CheckpointError) and not self._stops:
            self._warn(outcome)

    def wait_for_writes(self) -> None:
        """Wait for the save in progress; raises CheckpointError where it failed and the run stops then. Collective."""
        self._saver.wait()
        self.report_written()
        try:
            self._saver.finish()
        except CheckpointError as error:
            if self._stops:
                raise
            if not isinstance(self._reported, CheckpointError):  # it failed only on another rank
                self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        self._reporter(Warned(self._step, f"{error} Training continues, and the next save that is due tries again."))
