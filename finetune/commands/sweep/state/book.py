"""The book of a sweep: its state in memory and in `sweep.json`, written at every change."""

import sys
from dataclasses import replace
from pathlib import Path

from finetune.commands.sweep.plan.grid import SweepRun
from finetune.commands.sweep.state.outcome import Outcome, outcome_of, read_status
from finetune.commands.sweep.state.record import RecordedRun, SweepState, write_state


class SweepBook:
    """Records what becomes of the runs; a disk that is full does not end the sweep."""

    def __init__(self, folder: Path, state: SweepState) -> None:
        self.folder = folder
        self.state = state
        self._has_warned = False

    def add(self, run: SweepRun) -> None:
        """Record a run that is new to the sweep."""
        if run.name not in self.state.runs:
            self._change(RecordedRun(run.name, run.values))

    def start(self, run: SweepRun, *, now: float) -> None:
        """Record that a process of the run is about to be started."""
        self._change(replace(self.state.runs[run.name], started=now, exit_code=None, message=None))

    def end(self, run: SweepRun, *, exit_code: int, message: str | None = None) -> Outcome:
        """Record how the run's process has ended, and return how the run stands."""
        self._change(replace(self.state.runs[run.name], exit_code=exit_code, message=message))
        return self.outcome(run)

    def prune(self, run: SweepRun) -> None:
        """Record that the run is given up: it is not continued."""
        self._change(replace(self.state.runs[run.name], is_pruned=True))

    def outcome(self, run: SweepRun) -> Outcome:
        """Return how the run stands."""
        return outcome_of(read_status(run.folder), self.state.runs[run.name])

    def write(self) -> None:
        """Write the state; raises OSError where it cannot be written."""
        write_state(self.folder, self.state)

    def _change(self, run: RecordedRun) -> None:
        self.state = self.state.with_run(run)
        try:
            self.write()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(f"warning: {self.folder / 'sweep.json'} cannot be written: {error}", file=sys.stderr, flush=True)
