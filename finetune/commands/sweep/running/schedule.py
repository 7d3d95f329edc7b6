"""Starts the runs, as many at once as there are slots, watches them, and stops them in an orderly way."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from finetune.commands.sweep.plan.grid import SweepRun
from finetune.commands.sweep.plan.launch import LaunchPlan
from finetune.commands.sweep.running.history import RunHistory
from finetune.commands.sweep.running.process import (
    Start,
    StartedProcess,
    StopSignals,
    kill_tree,
    last_message,
    start_process,
)
from finetune.commands.sweep.state.book import SweepBook
from finetune.commands.sweep.state.outcome import FAILED, Outcome
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.runtime.supervision.writer_lock import is_locked

POLL_SECONDS, WATCH_SECONDS = 0.1, 1.0
STOP_FILE = "STOP"


@dataclass
class ActiveRun:
    """A run whose process is alive, or has ended while others of the run still write."""

    run: SweepRun
    process: StartedProcess
    slot: int
    history: RunHistory
    exit_code: int | None = None
    is_stopping: bool = False


class RunSource(Protocol):
    """Where the next run comes from: a grid, or a search."""

    def next_run(self) -> SweepRun | None:
        """Return the run to start next; None where there is none."""

    def is_hopeless(self, run: SweepRun, history: RunHistory) -> bool:
        """Tell whether the run is to be pruned."""

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Learn how a run has ended."""


class SweepScreen(Protocol):
    """What shows how the sweep goes."""

    def start_run(self, active: ActiveRun) -> None:
        """Show that a run has been started."""

    def update(self, active: list[ActiveRun]) -> None:
        """Show how far the active runs are."""

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended."""

    def log(self, line: str) -> None:
        """Show a line."""


def do_nothing() -> None:
    """Do nothing."""


@dataclass
class Scheduler:
    """Runs what a source gives; `load` returns the config of a run, and raises UserError where its job has changed."""

    plan: LaunchPlan
    book: SweepBook
    screen: SweepScreen
    stop: StopSignals
    load: Callable[[SweepRun], LoadedConfig]
    after_run: Callable[[], None] = do_nothing
    start: Start = start_process
    active: list[ActiveRun] = field(default_factory=list)
    _watched_at: float = 0.0

    def run_all(self, source: RunSource) -> None:
        """Return when all runs have ended, or, after a signal, when those that were going on have saved."""
        try:
            while self._fill_slots(source) or self.active:
                time.sleep(POLL_SECONDS)
                self._pass_on_signals()
                self._collect_ended(source)
                self._watch(source)
        except BaseException:
            for each in self.active:
                each.process.send_signal(signal.SIGTERM)
            raise

    def _fill_slots(self, source: RunSource) -> bool:
        """Start runs in the free slots; return whether one was begun."""
        has_begun = False
        while self.stop.first is None and len(self.active) < self.plan.at_once:
            run = source.next_run()
            if run is None:
                break
            has_begun = True
            self._begin(run, source)
        return has_begun

    def _begin(self, run: SweepRun, source: RunSource) -> None:
        slot = min(set(range(self.plan.at_once)) - {each.slot for each in self.active})
        history = RunHistory(run.folder / "events.jsonl")
        self.book.add(run)
        self.book.start(run, now=time.time())
        try:
            command = self.plan.command(run, self.load(run))
            (run.folder / STOP_FILE).unlink(missing_ok=True)  # of a start that had ended before it was seen
            process = self.start(command, run.log, self.plan.environment(slot))
        except (UserError, OSError) as error:
            self._end(run, source, history, exit_code=2, message=str(error))
            return
        self.active.append(ActiveRun(run, process, slot, history))
        self.screen.start_run(self.active[-1])

    def _pass_on_signals(self) -> None:
        if self.stop.first is None:
            return
        waiting = [each for each in self.active if not each.is_stopping]
        if waiting:
            count = f"{len(waiting)} run{'s' if len(waiting) > 1 else ''}"
            self.screen.log(
                f"{self.stop.first.name}: {count} will save and stop; the same command continues. Ctrl-C again kills."
            )
        for each in waiting:
            each.is_stopping = True
            each.process.send_signal(signal.SIGTERM)
        if self.stop.is_urgent:
            for each in self.active:
                kill_tree(each.process)

    def _collect_ended(self, source: RunSource) -> None:
        for each in list(self.active):
            if each.exit_code is None:
                each.exit_code = each.process.poll()
            if each.exit_code is None or (is_locked(each.run.folder) and not self.stop.is_urgent):
                continue  # a rank may outlive its launcher while it saves
            self.active.remove(each)
            message = last_message(each.run.log) if each.exit_code not in (0, -signal.SIGTERM) else None
            self._end(each.run, source, each.history, exit_code=each.exit_code, message=message)

    def _end(
        self, run: SweepRun, source: RunSource, history: RunHistory, *, exit_code: int, message: str | None
    ) -> None:
        history.read_new()
        outcome = self.book.end(run, exit_code=exit_code, message=message)
        source.end_run(run, outcome, history)
        self.screen.end_run(run, outcome, history)
        self.after_run()

    def _watch(self, source: RunSource) -> None:
        """Read what the runs have written, and prune those that are hopeless."""
        if time.monotonic() - self._watched_at < WATCH_SECONDS:
            return
        self._watched_at = time.monotonic()
        for each in self.active:
            each.history.read_new()
            if not each.is_stopping and source.is_hopeless(each.run, each.history):
                each.is_stopping = True
                self.book.prune(each.run)
                (each.run.folder / STOP_FILE).touch()
                self.screen.log(f"{each.run.name}: pruned at step {each.history.steps[-1]}; it saves and stops")
        self.screen.update(self.active)


@dataclass
class GridSource:
    """The runs of a grid, one after the other."""

    waiting: list[SweepRun]
    num_failed: int = 0

    def next_run(self) -> SweepRun | None:
        """Return the next run."""
        return self.waiting.pop(0) if self.waiting else None

    def is_hopeless(self, run: SweepRun, history: RunHistory) -> bool:
        """Return False: every run of a grid goes to its end."""
        return False

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Count the runs that fail."""
        self.num_failed += outcome.state == FAILED
