"""`finetune sweep`: a run for every combination of values, on all devices of this machine.

The phases: parse, check every run, run, compare. A killed sweep can be continued. Each process has its own session, so
that Ctrl-C reaches only the sweep, and ends with the sweep.
"""

import itertools
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.commands.printing import print_table
from finetune.commands.sweep.axes import Axis, bounds_of, grid_points, is_inside, parse_axes, parse_space, value_text
from finetune.commands.sweep.launching import LaunchPlan, Start, StopSignals, plan_launch, recorded_signals
from finetune.commands.sweep.results import (
    Objective,
    choose_objective,
    closing_lines,
    rank_results,
    read_sweep_result,
    results_table,
)
from finetune.commands.sweep.runs import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    WAITING,
    RecordedRun,
    SweepRun,
    check_runs,
    load_run,
    make_run,
)
from finetune.commands.sweep.study import SweepStudy, lock_sweep
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.child import end_of_log, kill_child, start_child
from finetune.runtime.run_folder import is_locked
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.redact import redacted_command
from finetune.runtime.text.terminal import printable

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class SweepRequest:
    """The options, with their names on the command line."""

    config: Path
    override: tuple[str, ...] = ()
    processes_per_run: int | None = None
    accelerate: Path | None = None
    folder: Path | None = None
    at_once: int | None = None
    metric: str | None = None
    search: int | None = None
    seed: int = 0
    retry_failed: bool = False
    dry_run: bool = False


def sweep(request: SweepRequest, *, start: Start = start_child) -> int:
    """Run the sweep, or continue it, print its results, and return the exit code: 1 where a run failed or was killed.

    After a signal the active runs save and stop; the code is then that of the signal. Before the first run starts,
    raises UserError with all problems of all runs.
    """
    axes = parse_axes(request.override)
    space = parse_space(axes, is_search=request.search is not None)
    points = grid_points(axes) if request.search is None else list(bounds_of(space, axes))
    plan = plan_launch(
        request.config.absolute(),
        num_processes=request.processes_per_run,
        accelerate_config=request.accelerate,
        at_once=request.at_once,
    )
    planned = [make_run(point, axes, folder=Path()) for point in points]
    first = check_runs(request.config, planned, num_processes=plan.data_parallel_size)
    objective = choose_objective(request.metric, first.config)
    if request.folder is None and is_url(first.config.run.folder):
        raise UserError(
            "--folder: the job's run.folder is a URL, and a sweep is written to a folder of this machine. Name one."
        )
    folder = (request.folder or Path(f"{first.config.run.folder}-sweep")).absolute()
    runs = [replace(run, sweep_folder=folder) for run in planned]
    if request.dry_run:
        count = f"{len(runs)} runs" if request.search is None else f"search of {request.search} runs, at its bounds"
        print(f"{count}, {plan.at_once} at once, in {folder}")
        for run in runs:
            state = read_status(run.folder).get("state", WAITING)
            print(f"{run.name}: {state}\n  {shlex.join(redacted_command(plan.command(run, first)))}")
        return 0
    with recorded_signals() as stop, lock_sweep(folder):
        study = SweepStudy(folder, space=space, seed=request.seed)
        study.begin(first.config, objective=objective, is_search=request.search is not None)
        session = SweepSession(request, plan, axes, objective, study, stop, start)
        session.wait_for_writers()
        if request.search is None:
            session.run_grid(runs)
        else:
            session.run_search(request.search)
        return session.conclude()


@dataclass
class ActiveRun:
    """A run whose launcher is alive, or has ended while other processes of the run still write."""

    run: SweepRun
    process: Any
    slot: int
    started: float
    exit_code: int | None = None
    is_stopping: bool = False


@dataclass
class SweepSession:
    """One call of `finetune sweep`."""

    request: SweepRequest
    plan: LaunchPlan
    axes: Sequence[Axis]
    objective: Objective
    study: SweepStudy
    stop: StopSignals
    start: Start
    active: list[ActiveRun] = field(default_factory=list)

    def wait_for_writers(self) -> None:
        """Wait until processes of an earlier, killed call have saved and no longer write to the runs."""
        for run in self.recorded_runs():
            if is_locked(run.folder) and self.stop.first is None:
                _log(f"waiting for {run.folder}, to which a run of an earlier call still writes")
            while is_locked(run.folder) and self.stop.first is None:
                time.sleep(POLL_SECONDS)

    def run_grid(self, runs: Sequence[SweepRun]) -> None:
        """Start or continue every run that is due, and return when they have ended."""
        for run in runs:
            self.study.add(run)
        due = [run for run in runs if self._is_due(run)]
        _log(f"{len(runs)} runs, {len(due)} to do, {self.plan.at_once} at once, in {self.study.folder}")
        self.run_all(iter(due))

    def run_search(self, num_runs: int) -> None:
        """Continue the runs of earlier calls that are due, then start new ones up to this number of runs."""
        known = self.recorded_runs()
        due = [run for run in known if self._is_due(run) and is_inside(run.values, self.study.space)]
        num_left = len(due) + max(0, num_runs - len(known))
        _log(f"search of {num_runs} runs, {num_left} to do, in {self.study.folder}")
        proposed = (self._as_run(self.study.propose()) for _ in range(num_runs - len(known)))
        self.run_all(itertools.chain(due, proposed))

    def _is_due(self, run: SweepRun) -> bool:
        """Return whether to start the run: failed ones only with `--retry-failed`."""
        state = self.study.outcome(run.name).state
        return state != FINISHED and (state != FAILED or self.request.retry_failed)

    def run_all(self, runs: Iterator[SweepRun]) -> None:
        """Train the runs; return when all have ended or, after a signal, when the active ones have saved."""
        try:
            while True:
                while self.stop.first is None and len(self.active) < self.plan.at_once:
                    run = next(runs, None)
                    if run is None:
                        break
                    self._start_run(run)
                if not self.active:
                    return
                time.sleep(POLL_SECONDS)
                if self.stop.first is not None:
                    self._forward_signal(self.stop.first)
                self._collect_ended()
        except BaseException:
            for active in self.active:
                active.process.send_signal(signal.SIGTERM)
            raise

    def _start_run(self, run: SweepRun) -> None:
        slot = min(set(range(self.plan.at_once)) - {active.slot for active in self.active})
        self.study.start(run)
        try:
            loaded = load_run(self.request.config, run, num_processes=self.plan.data_parallel_size)
            self.study.require_same_job(loaded.config)
            command = self.plan.command(run, loaded)
            started = time.time()
            process = self.start(command, log=run.log, environment=self.plan.environment(slot))
        except (UserError, OSError) as error:
            self._end(run, error=str(error))
            return
        self.active.append(ActiveRun(run, process, slot, started))
        _log(f"{run.name}: started, log in {run.log}")

    def _forward_signal(self, number: signal.Signals) -> None:
        to_stop = [active for active in self.active if not active.is_stopping]
        if to_stop:
            count = f"{len(to_stop)} run{'s' if len(to_stop) > 1 else ''}"
            _log(f"{number.name}: {count} will save and stop; the same command continues. Ctrl-C again kills.")
        for active in to_stop:
            active.is_stopping = True
            active.process.send_signal(signal.SIGTERM)
        if self.stop.is_urgent:
            for active in self.active:
                kill_child(active.process)

    def _collect_ended(self) -> None:
        """Record and print the runs that have ended."""
        for active in list(self.active):
            if active.exit_code is None:
                active.exit_code = active.process.poll()
            if active.exit_code is None or (is_locked(active.run.folder) and not self.stop.is_urgent):
                continue  # a rank may outlive its launcher while it saves
            self.active.remove(active)
            written = read_status(active.run.folder).get("time")
            has_status = isinstance(written, int | float) and written >= active.started
            error = None
            if active.exit_code > 0 and not has_status:
                error = printable(end_of_log(active.run.log)) or f"exit code {active.exit_code}"
            self._end(active.run, error=error)

    def _end(self, run: SweepRun, *, error: str | None) -> None:
        """Record and print how a run has ended."""
        outcome = self.study.end(run, error=error)
        facts = [outcome.state]
        if outcome.num_steps:
            facts.append(f"step {outcome.step}/{outcome.num_steps}")
        final = read_sweep_result(run, outcome, self.objective).final
        if final is not None:
            facts.append(f"{self.objective.metric} {final:.4f}")
        if outcome.message:
            facts.append(f"({outcome.message})")
        _log(f"{run.name}: {'  '.join(facts)}")

    def recorded_runs(self) -> list[SweepRun]:
        """Return all runs that the sweep has ever had."""
        return list(map(self._as_run, self.study.runs.values()))

    def _as_run(self, record: RecordedRun) -> SweepRun:
        """Return a run as it was recorded; secrets, which are not recorded, come from this call's options."""
        fixed = [axis for axis in self.axes if axis.key not in record.values]
        typed = {(axis.key, value_text(value)): value for axis in self.axes for value in axis.values}
        values = {key: typed.get((key, value_text(value)), value) for key, value in record.values.items()}
        recorded = [Axis(key, (value,), "") for key, value in values.items()]
        return make_run(values, [*recorded, *fixed], name=record.name, folder=self.study.folder)

    def conclude(self) -> int:
        """Print the results of all runs that the sweep has ever had, the best first, and return the exit code."""
        runs = [(run, self.study.outcome(run.name)) for run in self.recorded_runs()]
        results = rank_results(
            (read_sweep_result(run, outcome, self.objective) for run, outcome in runs), self.objective
        )
        print()
        print_table(results_table(results, self.objective, swept=self.study.facts.swept))
        for line in closing_lines(results, self.objective):
            print(line)
        if self.stop.first is not None:
            return 128 + self.stop.first
        return int(any(result.outcome.state in (FAILED, INTERRUPTED) for result in results))


def _log(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)
