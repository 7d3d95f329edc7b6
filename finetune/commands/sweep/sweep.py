"""`finetune sweep`: a run for every combination of values, as many at once as there are devices.

From the words typed to the table: parse, check every run, prepare the data, run, compare. A killed sweep continues.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.commands.printing import print_json, print_table
from finetune.commands.sweep.plan.axes import Axis, parse_axes
from finetune.commands.sweep.plan.grid import SweepRun, Values, check_runs, grid_points, name_runs
from finetune.commands.sweep.plan.launch import plan_launch
from finetune.commands.sweep.results.page import write_page
from finetune.commands.sweep.results.ranking import choose_objective
from finetune.commands.sweep.results.tables import closing_lines, results_json, results_table
from finetune.commands.sweep.running.process import Start, StopSignals, start_process
from finetune.commands.sweep.running.schedule import GridSource
from finetune.commands.sweep.search import open_search
from finetune.commands.sweep.session import SweepRequest, SweepSession, open_state, sweep_folder
from finetune.commands.sweep.state.book import SweepBook
from finetune.commands.sweep.state.outcome import FAILED, INTERRUPTED
from finetune.commands.sweep.state.record import lock_sweep
from finetune.commands.sweep.study.space import Space, bounds_of, parse_space, require_no_ranges
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.runtime.text.redact import redacted_command


def sweep(request: SweepRequest, *, start: Start = start_process) -> int:
    """Run the sweep, or continue it, print its results, and return the exit code: 1 where a run failed or was killed.

    After a signal the runs that are going on save and stop; the code is then that of the signal. Raises UserError for
    whatever can be seen before the first run starts, all problems of all runs at once.
    """
    axes = parse_axes(request.overrides)
    space = parse_space(axes) if request.search is not None else None
    if space is None:
        require_no_ranges(axes)
    points = list(bounds_of(space)) if space else _few_points(axes, most=request.max_runs)
    plan = plan_launch(
        request.job.absolute(),
        num_processes=request.processes_per_run,
        accelerate_config=request.accelerate,
        at_once=request.at_once,
    )
    swept = list(space) if space else [axis.key for axis in axes if axis.is_swept]
    planned = name_runs(points, axes, swept=swept, folder=Path(), names={})
    loaded = check_runs(request.job, planned, num_processes=plan.num_processes)
    config = loaded[planned[0].name].config
    objective, folder = choose_objective(request.metric, config), sweep_folder(request, config)
    state = open_state(folder, config, swept=swept, job=request.job.absolute())
    runs = name_runs(points, axes, swept=state.swept, folder=folder, names=state.names())
    configs = {run.name: loaded[each.name] for run, each in zip(runs, planned, strict=True)}
    with StopSignals() as stop:
        session = SweepSession(request, plan, axes, objective, SweepBook(folder, state), stop, start)
        if request.is_dry_run:
            _print_plan(session, runs, configs)
            return 0
        with lock_sweep(folder):
            session.book.write()
            session.wait_for_writers()
            if space:
                run_search(session, space, runs, configs)
            else:
                run_grid(session, runs, configs)
            return conclude(session)


def run_grid(session: SweepSession, runs: Sequence[SweepRun], configs: Mapping[str, LoadedConfig]) -> None:
    """Start or continue every run that is due, and return when they have ended."""
    for run in runs:
        session.book.add(run)
    due = [run for run in runs if session.is_due(run)]
    session.log(f"{len(runs)} runs, {len(due)} to do, {session.plan.at_once} at once, in {session.folder}")
    for group, message in session.prepare(due, configs):
        session.log(f"the data of {len(group)} runs cannot be prepared: {message}")
        for run in group:
            due.remove(run)
            session.book.start(run, now=time.time())
            session.book.end(run, exit_code=UserError.exit_code, message=message)
    session.run_all(GridSource(due), num_runs=len(due))


def run_search(
    session: SweepSession, space: Space, runs: Sequence[SweepRun], configs: Mapping[str, LoadedConfig]
) -> None:
    """Continue what an earlier call has begun, then start new runs; `runs` are the bounds of the space."""
    source = open_search(session, space)
    left = source.num_left
    session.log(f"search of {session.request.search} runs, {left} to do, in {session.folder}")
    for _, message in session.prepare(runs, configs) if left else ():
        raise UserError(f"the data cannot be prepared: {message}")
    session.run_all(source, num_runs=left)


def conclude(session: SweepSession) -> int:
    """Print the results, and return the exit code."""
    results, request = session.results(), session.request
    page = write_page(results, session.folder)
    if request.as_json:
        facts = results_json(results, session.objective, folder=session.folder, page=page)
        print_json(facts)
    else:
        print()
        print_table(results_table(results, session.objective, swept=session.book.state.swept))
        for line in closing_lines(results, session.objective, job=request.job, again=request.command):
            print(line)
        if page is not None:
            print(f"curves of the runs: {page}")
    if session.stop.first is not None:
        return 128 + session.stop.first
    return int(any(each.outcome.state in (FAILED, INTERRUPTED) for each in results))


def _few_points(axes: Sequence[Axis], *, most: int) -> list[Values]:
    """Return the points of the grid; raises UserError where they are too many to be meant."""
    count = math.prod(len(axis.values) for axis in axes)
    if count > most:
        raise UserError(
            f"--set: these values make {count:,} runs; at most {most:,} are started. Remove values, or confirm with "
            f"--max-runs {count}."
        )
    return grid_points(axes)


def _print_plan(session: SweepSession, runs: Sequence[SweepRun], configs: Mapping[str, LoadedConfig]) -> None:
    """Print what would be started."""
    commands = {run.name: redacted_command(session.plan.command(run, configs[run.name])) for run in runs}
    if session.request.as_json:
        each = [{"name": run.name, "folder": str(run.folder), "command": commands[run.name]} for run in runs]
        print_json({"folder": str(session.folder), "at_once": session.plan.at_once, "runs": each})
        return
    search = session.request.search
    what = f"{len(runs)} runs" if search is None else f"search of {search} runs, checked at the bounds below"
    print(f"{what}, {session.plan.at_once} at once, in {session.folder}")
    for run in runs:
        state = session.book.outcome(run).state if run.name in session.book.state.runs else "waiting"
        print(f"{run.name}: {state}\n  {shlex.join(commands[run.name])}")
