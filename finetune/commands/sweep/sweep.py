"""`finetune sweep`: a run for every combination of values, on all devices of this machine or of a Ray cluster.

The phases: parse, check every run, prepare the data, run, compare. A killed sweep can be continued.
"""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from finetune.commands.printing import print_json, print_table
from finetune.commands.sweep.axes import Axis, Values, parse_axes, value_text
from finetune.commands.sweep.results import (
    Objective,
    RunResult,
    choose_objective,
    closing_lines,
    history_so_far,
    rank,
    read_result,
    results_json,
    results_table,
    write_page,
)
from finetune.commands.sweep.runs import (
    DONE,
    FAILED,
    INTERRUPTED,
    WAITING,
    RecordedRun,
    SweepRun,
    check_runs,
    data_facts,
    grid_points,
    load_run,
    make_run,
    name_runs,
)
from finetune.commands.sweep.schedule import (
    POLL_SECONDS,
    LaunchPlan,
    Scheduler,
    Start,
    StopSignals,
    SweepScreen,
    plan_launch,
    prepare_data,
)
from finetune.commands.sweep.space import Space, bounds_of, choices_of, is_inside, parse_space
from finetune.commands.sweep.study import SweepStudy, lock_sweep
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.child import kill_child, start_child
from finetune.runtime.optional import lazily
from finetune.runtime.run_folder import is_locked
from finetune.runtime.text.redact import redacted_command

with lazily():  # Ray's commands
    from finetune.commands.sweep import ray_runs

MAX_RUNS = 100
"""More have to be confirmed with `--max-runs`."""

_SECONDS_BETWEEN_PAGES = 60.0


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

    @property
    def output(self) -> TextIO:
        """Return the stream of the progress; with JSON, standard output has nothing else."""
        return sys.stderr if self.as_json else sys.stdout

    @property
    def command(self) -> list[str]:
        """Return the command that continues this sweep, without secrets."""
        options = {
            "--processes-per-run": self.processes_per_run,
            "--accelerate": self.accelerate,
            "--folder": self.folder,
            "--at-once": self.at_once,
            "--ray": self.ray,
            "--metric": self.metric,
            "--search": self.search,
            "--seed": self.seed or None,
            "--max-runs": self.max_runs if self.max_runs != MAX_RUNS else None,
        }
        words = ["finetune", "sweep", "--config", str(self.job)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return redacted_command(words)


def sweep(request: SweepRequest, *, start: Start = start_child) -> int:
    """Run the sweep, or continue it, print its results, and return the exit code: 1 where a run failed or was killed.

    After a signal the active runs save and stop; the code is then that of the signal. Before the first run starts,
    raises UserError with all problems of all runs.
    """
    axes = parse_axes(request.overrides)
    if request.search is not None:
        space = parse_space(axes)
        points = list(bounds_of(space, axes))
    else:
        space = choices_of(axes)
        count = math.prod(len(axis.values) for axis in axes)
        if count > request.max_runs:
            raise UserError(
                f"--set: these values make {count:,} runs; at most {request.max_runs:,} are started. Remove values, or "
                f"confirm with --max-runs {count}."
            )
        points = grid_points(axes)
    with ExitStack() as connection:
        cluster = None if request.ray is None else connection.enter_context(ray_runs.ray_cluster(request.ray))
        return _sweep(request, axes, space, points, cluster=cluster, connection=connection, start=start)


def _sweep(
    request: SweepRequest,
    axes: Sequence[Axis],
    space: Space,
    points: Sequence[Values],
    *,
    cluster: "ray_runs.RayCluster | None",
    connection: ExitStack,
    start: Start,
) -> int:
    """Run the sweep here, or on the cluster, and return the exit code. Results are printed once it is disconnected."""
    plan = plan_launch(
        request.job.absolute(),
        num_processes=request.processes_per_run,
        accelerate_config=request.accelerate,
        at_once=request.at_once,
        hosts=None if cluster is None else cluster.hosts,
    )
    kill: Callable[[Any], None] = kill_child
    if cluster is not None:
        start, kill = partial(cluster.start, num_processes=plan.num_processes), ray_runs.RayProcess.kill
    swept = list(space)
    planned = name_runs(points, axes, swept=swept, folder=Path(), names={})
    configs = check_runs(request.job, planned, num_processes=plan.data_parallel_size)
    config = configs[planned[0].name].config
    objective = choose_objective(request.metric, config)
    if request.folder is None and is_url(config.run.folder):
        raise UserError(
            "--folder: the job's run.folder is a URL, and a sweep is written to a folder of this machine. Name one."
        )
    folder = request.folder.absolute() if request.folder is not None else Path(f"{config.run.folder}-sweep")

    def open_session(stop: StopSignals) -> SweepSession:
        study = SweepStudy(folder, space=space, seed=request.seed)
        study.begin(config, swept=swept, job=request.job.absolute(), objective=objective)
        if request.search is not None:
            study.require_same_objective(objective)
        runs = name_runs(points, axes, swept=study.facts.swept, folder=folder, names=study.names)
        by_name = {run.name: configs[unnamed.name] for run, unnamed in zip(runs, planned, strict=True)}
        return SweepSession(request, plan, axes, objective, study, runs, by_name, stop, start, kill)

    with StopSignals() as stop:
        if request.is_dry_run:
            session = open_session(stop)
            connection.close()
            session.print_plan()
            return 0
        with lock_sweep(folder):
            session = open_session(stop)
            session.study.save()
            session.wait_for_writers()
            if request.search is None:
                session.run_grid()
            else:
                session.run_search(request.search)
            connection.close()
            return session.conclude()


@dataclass
class SweepSession:
    """One call of `finetune sweep`; `runs` are those of the grid, or the bounds of a search."""

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
    _drawn_at: float = field(default=-_SECONDS_BETWEEN_PAGES)

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
        has_logged = False
        for run in self.recorded_runs():
            while is_locked(run.folder) and self.stop.first is None:
                if not has_logged:
                    has_logged = True
                    self.log(f"waiting for {run.folder}, to which a run of an earlier call still writes")
                time.sleep(POLL_SECONDS)

    def run_grid(self) -> None:
        """Start or continue every run that is due, and return when they have ended."""
        for run in self.runs:
            self.study.add(run)
        due = [run for run in self.runs if self._is_due(run)]
        self.log(f"{len(self.runs)} runs, {len(due)} to do, {self.plan.at_once} at once, in {self.study.folder}")
        for group, message in self._prepare(due):
            self.log(f"the data of {len(group)} runs cannot be prepared: {message}")
            for run in group:
                due.remove(run)
                self.study.start(run, now=time.time())
                self.study.end(run, history_so_far(run.folder), exit_code=UserError.exit_code, message=message)
        self._run_all(iter(due), num_runs=len(due))

    def run_search(self, num_runs: int) -> None:
        """Continue the runs of earlier calls that are due, then start new ones up to this number of runs."""
        known = self.recorded_runs()
        due = [run for run in known if self._is_due(run) and is_inside(run.values, self.study.space)]
        num_left = len(due) + max(0, num_runs - len(known))
        self.log(f"search of {num_runs} runs, {num_left} to do, in {self.study.folder}")
        for _, message in self._prepare(self.runs) if num_left else ():
            raise UserError(f"the data cannot be prepared: {message}")

        def next_runs() -> Iterator[SweepRun]:
            yield from due
            while len(self.study.runs) < num_runs:
                yield self._recorded_run(self.study.propose())

        self._run_all(next_runs(), num_runs=num_left)

    def _is_due(self, run: SweepRun) -> bool:
        """Return whether to start the run: failed ones only with `--retry-failed`."""
        state = self.study.outcome(run.name).state
        return state not in DONE and (state != FAILED or self.request.retries_failed)

    def _prepare(self, runs: Sequence[SweepRun]) -> Iterator[tuple[Sequence[SweepRun], str]]:
        """Tokenize the data that several of the runs share; yield those for which it failed, with the message."""
        groups: dict[object, list[SweepRun]] = {}
        for run in runs:
            groups.setdefault(data_facts(self.configs[run.name].config), []).append(run)
        shared = [group for group in groups.values() if len(group) > 1]
        for number, group in enumerate(shared, start=1):
            if self.stop.first is not None:
                return
            self.log("preparing the data that the runs share")
            message = prepare_data(group[0], number=number, plan=self.plan, stop=self.stop, start=self.start)
            if message is not None:
                yield group, message

    def _run_all(self, runs: Iterator[SweepRun], *, num_runs: int) -> None:
        def load(run: SweepRun) -> LoadedConfig:
            loaded = load_run(self.request.job, run, num_processes=self.plan.data_parallel_size)
            self.study.require_same_job(loaded.config, swept=self.study.facts.swept)
            return loaded

        with closing(SweepScreen(self.request.output, num_runs=num_runs)) as screen:
            Scheduler(
                plan=self.plan,
                study=self.study,
                screen=screen,
                stop=self.stop,
                load=load,
                runs=runs,
                after_run=self._draw_page,
                prunes=self.request.search is not None,
                start=self.start,
                kill=self.kill,
            ).run_all()

    def _draw_page(self) -> None:
        """Write the page with the curves of all runs, once a minute at most."""
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_PAGES:
            self._drawn_at = time.monotonic()
            write_page(self.results(), self.study.folder)

    def results(self) -> list[RunResult]:
        """Return the results of all runs that the sweep has ever had, the best first."""
        runs = self.recorded_runs()
        return rank((read_result(run, self.study.outcome(run.name), self.objective) for run in runs), self.objective)

    def recorded_runs(self) -> list[SweepRun]:
        """Return all runs that the sweep has ever had."""
        return [self._recorded_run(record) for record in self.study.runs.values()]

    def _recorded_run(self, record: RecordedRun) -> SweepRun:
        """Return a run as it was recorded; secrets, which are not recorded, come from this call's options."""
        fixed = [axis for axis in self.axes if axis.key not in record.values]
        typed = {(axis.key, value_text(value)): value for axis in self.axes for value in axis.values}
        values = {key: typed.get((key, value_text(value)), value) for key, value in record.values.items()}
        recorded = [Axis(key, (value,), "") for key, value in values.items()]
        return make_run(values, [*recorded, *fixed], name=record.name, folder=self.study.folder)

    def conclude(self) -> int:
        """Print the results, and return the exit code."""
        results = self.results()
        page = write_page(results, self.study.folder)
        if self.request.as_json:
            print_json(results_json(results, self.objective, folder=self.study.folder, page=page))
        else:
            print()
            print_table(results_table(results, self.objective, swept=self.study.facts.swept))
            for line in closing_lines(results, self.objective, job=self.request.job, again=self.request.command):
                print(line)
            if page is not None:
                print(f"curves of the runs: {page}")
        if self.stop.first is not None:
            return 128 + self.stop.first
        return int(any(result.outcome.state in (FAILED, INTERRUPTED) for result in results))

    def log(self, line: str) -> None:
        """Print a line of progress."""
        print(line, file=self.request.output, flush=True)
