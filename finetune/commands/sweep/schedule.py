"""Starts the runs, as many at once as there are slots, watches them, and stops them in an orderly way."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from finetune.commands.sweep.history import RunHistory
from finetune.commands.sweep.launch import LaunchPlan
from finetune.commands.sweep.process import (
    POLL_SECONDS,
    Start,
    StartedProcess,
    StopSignals,
    kill_tree,
    last_message,
    start_process,
)
from finetune.commands.sweep.runs import SweepRun
from finetune.commands.sweep.screen import SweepScreen
from finetune.commands.sweep.study import SweepStudy
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.runtime.supervision.writer_lock import is_locked

WATCH_SECONDS = 1.0
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


@dataclass
class Scheduler:
    """Runs what `next_run` gives; `load` returns a run's config, and raises UserError where its job has changed."""

    plan: LaunchPlan
    study: SweepStudy
    screen: SweepScreen
    stop: StopSignals
    load: Callable[[SweepRun], LoadedConfig]
    next_run: Callable[[], SweepRun | None]
    after_run: Callable[[], None]
    prunes: bool = False
    start: Start = start_process
    active: list[ActiveRun] = field(default_factory=list)
    _watched_at: float = 0.0

    def run_all(self) -> None:
        """Return when all runs have ended, or, after a signal, when the active ones have saved."""
        try:
            while self._fill_slots() or self.active:
                time.sleep(POLL_SECONDS)
                self._pass_on_signals()
                self._collect_ended()
                self._watch()
        except BaseException:
            for active in self.active:
                active.process.send_signal(signal.SIGTERM)
            raise

    def _fill_slots(self) -> bool:
        """Start runs in the free slots; return whether there was one to start."""
        has_begun = False
        while self.stop.first is None and len(self.active) < self.plan.at_once and (run := self.next_run()):
            has_begun = True
            self._begin(run)
        return has_begun

    def _begin(self, run: SweepRun) -> None:
        slot = min(set(range(self.plan.at_once)) - {active.slot for active in self.active})
        history = RunHistory(run.folder / "events.jsonl")
        self.study.add(run)
        self.study.start(run, now=time.time())
        try:
            command = self.plan.command(run, self.load(run))
            (run.folder / STOP_FILE).unlink(missing_ok=True)  # of an earlier start that ended before it read it
            process = self.start(command, run.log, self.plan.environment(slot))
        except (UserError, OSError) as error:
            self._end(run, history, exit_code=2, message=str(error))
            return
        self.active.append(ActiveRun(run, process, slot, history))
        self.screen.start_run(run)

    def _pass_on_signals(self) -> None:
        if self.stop.first is None:
            return
        to_stop = [active for active in self.active if not active.is_stopping]
        if to_stop:
            count = f"{len(to_stop)} run{'s' if len(to_stop) > 1 else ''}"
            name = self.stop.first.name
            self.screen.log(f"{name}: {count} will save and stop; the same command continues. Ctrl-C again kills.")
        for active in to_stop:
            active.is_stopping = True
            active.process.send_signal(signal.SIGTERM)
        if self.stop.is_urgent:
            for active in self.active:
                kill_tree(active.process)

    def _collect_ended(self) -> None:
        for active in list(self.active):
            if active.exit_code is None:
                active.exit_code = active.process.poll()
            if active.exit_code is None or (is_locked(active.run.folder) and not self.stop.is_urgent):
                continue  # a rank may outlive its launcher while it saves
            self.active.remove(active)
            message = last_message(active.run.log) if active.exit_code not in (0, -signal.SIGTERM) else None
            self._end(active.run, active.history, exit_code=active.exit_code, message=message)

    def _end(self, run: SweepRun, history: RunHistory, *, exit_code: int, message: str | None) -> None:
        history.read_new()
        outcome = self.study.end(run, history, exit_code=exit_code, message=message)
        self.screen.end_run(run, outcome, history)
        self.after_run()

    def _watch(self) -> None:
        """Read what the runs have written, and prune the hopeless ones of a search."""
        if time.monotonic() - self._watched_at < WATCH_SECONDS:
            return
        self._watched_at = time.monotonic()
        for active in self.active:
            active.history.read_new()
            if self.prunes and not active.is_stopping and self.study.should_prune(active.run.name, active.history):
                active.is_stopping = True
                self.study.prune(active.run)
                (active.run.folder / STOP_FILE).touch()
                step = active.history.steps[-1]
                self.screen.log(f"{active.run.name}: pruned at step {step}; it will save and stop")
        self.screen.update([(active.run, active.history, active.is_stopping) for active in self.active])
