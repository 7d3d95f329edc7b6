"""`finetune sweep`: a run for every combination of values, on all devices of this machine or of a Ray cluster.

The phases: parse, check every run, prepare the data, run, compare. A killed sweep can be continued. Each process has
its own session, so that Ctrl-C reaches only the sweep, and ends with the sweep.
"""

import itertools
import math
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from finetune.commands.printing import print_json, print_table
from finetune.commands.sweep.axes import Axis, bounds_of, grid_points, is_inside, parse_axes, parse_space, value_text
from finetune.commands.sweep.launching import (
    LOST_HOST,
    VISIBLE_DEVICES,
    LaunchPlan,
    RayProcess,
    Start,
    StopSignals,
    plan_launch,
    ray_cluster,
    recorded_signals,
)
from finetune.commands.sweep.results import (
    Objective,
    SweepResult,
    SweepScreen,
    choose_objective,
    closing_lines,
    history_so_far,
    rank_results,
    read_sweep_result,
    results_json,
    results_table,
    write_sweep_page,
)
from finetune.commands.sweep.runs import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOGS_FOLDER,
    WAITING,
    RecordedRun,
    SweepRun,
    check_runs,
    data_facts,
    load_run,
    make_run,
    name_runs,
)
from finetune.commands.sweep.study import SweepStudy, lock_sweep
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.child import end_of_log, kill_child, start_child
from finetune.report.history import EVENTS_FILE, HistoryReader
from finetune.runtime.run_folder import is_locked
from finetune.runtime.text.redact import redacted_command
from finetune.runtime.text.terminal import printable

MAX_RUNS = 100
"""More have to be confirmed with `--max-runs`."""

POLL_SECONDS, WATCH_SECONDS, PAGE_SECONDS = 0.1, 1.0, 60.0
STOP_FILE = "STOP"

MAX_LOST = 5
"""Hosts that a run may lose, one after the other: it may be what brings them down."""

_OF_ONE_CALL = ("--retry-failed", "--json")
"""Options that the command to continue with does not repeat."""


@dataclass(frozen=True)
class SweepRequest:
    """The options of the command line."""

    job: Path
    overrides: tuple[str, ...] = ()
    processes_per_run: int | None = None
    accelerate: Path | None = None
    folder: Path | None = None
    at_once: int | None = None
    metric: str | None = None
    search: int | None = None
    seed: int = 0
    max_runs: int = MAX_RUNS
    retries_failed: bool = False
    is_dry_run: bool = False
    as_json: bool = False
    ray: str | None = None  # the head of a Ray cluster, `auto` or `local`


def sweep(request: SweepRequest, *, start: Start = start_child) -> int:
    """Run the sweep, or continue it, print its results, and return the exit code: 1 where a run failed or was killed.

    After a signal the active runs save and stop; the code is then that of the signal. Before the first run starts,
    raises UserError with all problems of all runs.
    """
    axes = parse_axes(request.overrides)
    space = parse_space(axes, is_search=request.search is not None)
    count = math.prod(len(axis.values) for axis in axes)
    if request.search is None and count > request.max_runs:
        raise UserError(
            f"--set: these values make {count:,} runs; at most {request.max_runs:,} are started. Remove values, or "
            f"confirm with --max-runs {count}."
        )
    points = grid_points(axes) if request.search is None else list(bounds_of(space, axes))
    with ExitStack() as connection:
        cluster = None if request.ray is None else connection.enter_context(ray_cluster(request.ray))
        plan = plan_launch(
            request.job.absolute(),
            num_processes=request.processes_per_run,
            accelerate_config=request.accelerate,
            at_once=request.at_once,
            hosts=None if cluster is None else cluster.hosts,
        )
        kill: Callable[[Any], None] = kill_child
        if cluster is not None:
            start, kill = partial(cluster.start, num_processes=plan.num_processes), RayProcess.kill
        planned = name_runs(points, axes, swept=space, folder=Path(), names={})
        configs = check_runs(request.job, planned, num_processes=plan.data_parallel_size)
        config = configs[planned[0].name].config
        objective = choose_objective(request.metric, config)
        if request.folder is None and is_url(config.run.folder):
            raise UserError(
                "--folder: the job's run.folder is a URL, and a sweep is written to a folder of this machine. Name one."
            )
        folder = request.folder.absolute() if request.folder is not None else Path(f"{config.run.folder}-sweep")
        with recorded_signals() as stop, nullcontext() if request.is_dry_run else lock_sweep(folder):
            study = SweepStudy(folder, space=space, seed=request.seed)
            study.begin(config, job=request.job.absolute(), objective=objective, is_search=request.search is not None)
            runs = name_runs(points, axes, swept=study.facts.swept, folder=folder, names=study.names)
            by_name = {run.name: configs[unnamed.name] for run, unnamed in zip(runs, planned, strict=True)}
            session = SweepSession(request, plan, axes, objective, study, runs, by_name, stop, start, kill)
            if request.is_dry_run:
                connection.close()
                session.print_plan()
                return 0
            study.save()
            session.wait_for_writers()
            if request.search is None:
                session.run_grid()
            else:
                session.run_search(request.search)
            connection.close()
            return session.conclude()


@dataclass
class ActiveRun:
    """A run whose launcher is alive, or has ended while other processes of the run still write."""

    run: SweepRun
    process: Any
    slot: int
    reader: HistoryReader
    exit_code: int | None = None
    is_stopping: bool = False


@dataclass
class SweepSession:
    """One call of `finetune sweep`; `runs` are the runs of the grid, or the bounds of a search."""

    request: SweepRequest
    plan: LaunchPlan
    axes: Sequence[Axis]
    objective: Objective
    study: SweepStudy
    runs: Sequence[SweepRun]
    configs: Mapping[str, LoadedConfig]
    stop: StopSignals
    start: Start
    kill: Callable[[Any], None]
    active: list[ActiveRun] = field(default_factory=list)
    _num_lost: Counter[str] = field(default_factory=Counter)
    _drawn_at: float = -PAGE_SECONDS

    @property
    def output(self) -> TextIO:
        """Return the stream of the progress; with JSON, standard output has nothing else."""
        return sys.stderr if self.request.as_json else sys.stdout

    def print_plan(self) -> None:
        """Print the commands that would be started."""
        commands = {run.name: redacted_command(self.plan.command(run, self.configs[run.name])) for run in self.runs}
        folder, at_once, search = self.study.folder, self.plan.at_once, self.request.search
        if self.request.as_json:
            runs = [{"name": run.name, "folder": str(run.folder), "command": commands[run.name]} for run in self.runs]
            print_json({"folder": str(folder), "at_once": at_once, "runs": runs})
            return
        count = f"{len(self.runs)} runs" if search is None else f"search of {search} runs, checked at the bounds below"
        print(f"{count}, {at_once} at once, in {folder}")
        for run in self.runs:
            state = self.study.outcome(run.name).state if run.name in self.study.runs else WAITING
            print(f"{run.name}: {state}\n  {shlex.join(commands[run.name])}")

    def wait_for_writers(self) -> None:
        """Wait until processes of an earlier, killed call have saved and no longer write to the runs."""
        for run in self.recorded_runs():
            if is_locked(run.folder) and self.stop.first is None:
                self._log(f"waiting for {run.folder}, to which a run of an earlier call still writes")
            while is_locked(run.folder) and self.stop.first is None:
                time.sleep(POLL_SECONDS)

    def run_grid(self) -> None:
        """Start or continue every run that is due, and return when they have ended."""
        for run in self.runs:
            self.study.add(run)
        due = [run for run in self.runs if self._is_due(run)]
        self._log(f"{len(self.runs)} runs, {len(due)} to do, {self.plan.at_once} at once, in {self.study.folder}")
        for group, message in self._prepare_data(due):
            self._log(f"the data of {len(group)} runs cannot be prepared: {message}")
            for run in group:
                due.remove(run)
                self.study.start(run, now=time.time())
                self.study.end(run, history_so_far(run.folder), exit_code=UserError.exit_code, message=message)
        self.run_all(iter(due), num_runs=len(due))

    def run_search(self, num_runs: int) -> None:
        """Continue the runs of earlier calls that are due, then start new ones up to this number of runs."""
        known = self.recorded_runs()
        due = [run for run in known if self._is_due(run) and is_inside(run.values, self.study.space)]
        num_left = len(due) + max(0, num_runs - len(known))
        self._log(f"search of {num_runs} runs, {num_left} to do, in {self.study.folder}")
        for _, message in self._prepare_data(self.runs) if num_left else ():
            raise UserError(f"the data cannot be prepared: {message}")
        proposed = (self._as_run(self.study.propose()) for _ in range(num_runs - len(known)))
        self.run_all(itertools.chain(due, proposed), num_runs=num_left)

    def _is_due(self, run: SweepRun) -> bool:
        """Return whether to start the run: failed ones only with `--retry-failed`."""
        state = self.study.outcome(run.name).state
        return state not in DONE and (state != FAILED or self.request.retries_failed)

    def _prepare_data(self, runs: Sequence[SweepRun]) -> Iterator[tuple[Sequence[SweepRun], str]]:
        """Tokenize the data that several of the runs share, so that none waits for the lock of another.

        Yield the runs for which `finetune prepare` failed, with the message.
        """
        groups: dict[object, list[SweepRun]] = {}
        for run in runs:
            groups.setdefault(data_facts(self.configs[run.name].config), []).append(run)
        for number, group in enumerate((group for group in groups.values() if len(group) > 1), start=1):
            if self.stop.first is not None:
                return
            self._log("preparing the data that the runs share")
            log = self.study.folder / LOGS_FOLDER / f"prepare-{number}.log"
            words = [word for override in group[0].overrides for word in ("--set", override)]
            command = [sys.executable, "-m", "finetune", "prepare", "--config", str(self.plan.job), *words]
            process = self.start(command, log=log, environment={VISIBLE_DEVICES: ""})
            is_signaled = False
            while (code := process.poll()) is None:
                if self.stop.first is not None and not is_signaled:
                    is_signaled = True
                    process.send_signal(self.stop.first)
                time.sleep(POLL_SECONDS)
            if code != 0 and self.stop.first is None:
                message = f"`finetune prepare` ended with exit code {code}; see {log}"
                yield group, printable(end_of_log(log)) or message

    def run_all(self, runs: Iterator[SweepRun], *, num_runs: int) -> None:
        """Train the runs; return when all have ended or, after a signal, when the active ones have saved."""
        watched_at = 0.0
        with closing(SweepScreen(self.output, num_runs=num_runs)) as screen:
            try:
                while True:
                    while self.stop.first is None and len(self.active) < self.plan.at_once:
                        run = next(runs, None)
                        if run is None:
                            break
                        self._start_run(run, screen)
                    if not self.active:
                        return
                    time.sleep(POLL_SECONDS)
                    if self.stop.first is not None:
                        self._forward_signal(self.stop.first, screen)
                    if again := self._collect_ended(screen):
                        runs = itertools.chain(again, runs)
                    if time.monotonic() - watched_at >= WATCH_SECONDS:
                        watched_at = time.monotonic()
                        self._watch(screen)
            except BaseException:
                for active in self.active:
                    active.process.send_signal(signal.SIGTERM)
                raise

    def _load(self, run: SweepRun) -> LoadedConfig:
        """Return the run's config; raises UserError if the job has changed."""
        loaded = load_run(self.request.job, run, num_processes=self.plan.data_parallel_size)
        self.study.require_same_job(loaded.config)
        return loaded

    def _start_run(self, run: SweepRun, screen: SweepScreen) -> None:
        slot = min(set(range(self.plan.at_once)) - {active.slot for active in self.active})
        reader = HistoryReader(run.folder / EVENTS_FILE)
        self.study.add(run)
        self.study.start(run, now=time.time())
        try:
            command = self.plan.command(run, self._load(run))
            (run.folder / STOP_FILE).unlink(missing_ok=True)  # of an earlier process that ended before it read the file
            process = self.start(command, log=run.log, environment=self.plan.environment(slot))
        except (UserError, OSError) as error:
            self._end(run, reader, screen, exit_code=UserError.exit_code, message=str(error))
            return
        self.active.append(ActiveRun(run, process, slot, reader))
        screen.start_run(run)

    def _forward_signal(self, number: signal.Signals, screen: SweepScreen) -> None:
        to_stop = [active for active in self.active if not active.is_stopping]
        if to_stop:
            count = f"{len(to_stop)} run{'s' if len(to_stop) > 1 else ''}"
            screen.log(f"{number.name}: {count} will save and stop; the same command continues. Ctrl-C again kills.")
        for active in to_stop:
            active.is_stopping = True
            active.process.send_signal(signal.SIGTERM)
        if self.stop.is_urgent:
            for active in self.active:
                self.kill(active.process)

    def _collect_ended(self, screen: SweepScreen) -> list[SweepRun]:
        """Record the runs that have ended; return the runs that have lost their host and are started again."""
        again = []
        for active in list(self.active):
            if active.exit_code is None:
                active.exit_code = active.process.poll()
            if active.exit_code is None or (is_locked(active.run.folder) and not self.stop.is_urgent):
                continue  # a rank may outlive its launcher while it saves
            self.active.remove(active)
            if active.exit_code == LOST_HOST:
                active.exit_code = -signal.SIGKILL
                self._num_lost[active.run.name] += 1
                if not active.is_stopping and self._num_lost[active.run.name] <= MAX_LOST:
                    screen.log(f"{active.run.name}: its host is lost; it is started again, and resumes")
                    again.append(active.run)
                    continue
            message = printable(end_of_log(active.run.log)) if active.exit_code not in (0, -signal.SIGTERM) else None
            self._end(active.run, active.reader, screen, exit_code=active.exit_code, message=message)
        return again

    def _end(
        self, run: SweepRun, reader: HistoryReader, screen: SweepScreen, *, exit_code: int, message: str | None
    ) -> None:
        """Record and show how a run has ended, and, once a minute at most, write the page with the curves of all."""
        with suppress(OSError):
            reader.read_new()
        outcome = self.study.end(run, reader.history, exit_code=exit_code, message=message)
        screen.end_run(run, outcome, reader.history)
        if time.monotonic() - self._drawn_at >= PAGE_SECONDS:
            self._drawn_at = time.monotonic()
            write_sweep_page(self._results(), self.study.folder)

    def _watch(self, screen: SweepScreen) -> None:
        """Read the new events of the runs, and prune the poor ones of a search."""
        for active in self.active:
            with suppress(OSError):
                active.reader.read_new()
            history = active.reader.history
            is_search = self.request.search is not None
            if is_search and not active.is_stopping and self.study.should_prune(active.run.name, history):
                active.is_stopping = True
                (active.run.folder / STOP_FILE).touch()
                screen.log(f"{active.run.name}: pruned at step {history.step}; it will save and stop")
        screen.update([(active.run, active.reader.history, active.is_stopping) for active in self.active])

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

    def _results(self) -> list[SweepResult]:
        """Return the results of all runs that the sweep has ever had, the best first."""
        results = (read_sweep_result(run, self.study.outcome(run.name), self.objective) for run in self.recorded_runs())
        return rank_results(results, self.objective)

    def conclude(self) -> int:
        """Print the results, and return the exit code."""
        results = self._results()
        page = write_sweep_page(results, self.study.folder)
        if self.request.as_json:
            print_json(results_json(results, self.objective, folder=self.study.folder, page=page))
        else:
            print()
            print_table(results_table(results, self.objective, swept=self.study.facts.swept))
            again = redacted_command(["finetune", *(word for word in sys.argv[1:] if word not in _OF_ONE_CALL)])
            for line in closing_lines(results, self.objective, job=self.request.job, again=again):
                print(line)
            if page is not None:
                print(f"curves of the runs: {page}")
        if self.stop.first is not None:
            return 128 + self.stop.first
        return int(any(result.outcome.state in (FAILED, INTERRUPTED) for result in results))

    def _log(self, line: str) -> None:
        """Print a line of progress."""
        print(line, file=self.output, flush=True)
