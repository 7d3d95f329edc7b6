"""`finetune sweep`: a run for every combination of values, as many at once as there are devices.

From the words typed to the table: parse, check every run, prepare the data, run, compare. A killed sweep continues.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.commands.printing import print_table
from finetune.commands.sweep.plan.axes import Axis, parse_axes
from finetune.commands.sweep.plan.grid import SweepRun, check_runs, grid_points, name_runs
from finetune.commands.sweep.plan.launch import plan_launch
from finetune.commands.sweep.results.ranking import choose_objective
from finetune.commands.sweep.results.tables import closing_lines, results_json, results_table
from finetune.commands.sweep.running.process import Start, StopSignals, start_process
from finetune.commands.sweep.running.schedule import GridSource
from finetune.commands.sweep.session import SweepRequest, SweepSession, open_state, sweep_folder
from finetune.commands.sweep.state.book import SweepBook
from finetune.commands.sweep.state.outcome import FAILED
from finetune.commands.sweep.state.record import lock_sweep
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.runtime.text.terminal import format_json

PAGE = "sweep.html"


def sweep(request: SweepRequest, *, start: Start = start_process) -> int:
    """Run the sweep, or continue it, print its results, and return the exit code: 1 where a run has failed.

    After a signal the runs that are going on save and stop; the code is then that of the signal. Raises UserError for
    whatever can be seen before the first run starts, all problems of all runs at once.
    """
    axes = parse_axes(request.overrides)
    _require_few(axes, most=request.max_runs)
    plan = plan_launch(
        request.job.absolute(),
        num_processes=request.processes_per_run,
        accelerate_config=request.accelerate,
        at_once=request.at_once,
    )
    points = grid_points(axes, swept=[axis.key for axis in axes])
    planned = name_runs(points, axes, folder=Path(), names={})
    loaded = check_runs(request.job, planned, num_processes=plan.num_processes)
    config = loaded[planned[0].name].config
    objective = choose_objective(request.metric, config)
    folder = sweep_folder(request, config)
    state = open_state(folder, config, axes=axes, job=request.job.absolute())
    swept = grid_points(axes, swept=state.swept)
    runs = name_runs(swept, axes, folder=folder, names=state.names())
    configs = {run.name: loaded[each.name] for run, each in zip(runs, planned, strict=True)}
    with StopSignals() as stop:
        session = SweepSession(request, plan, axes, objective, SweepBook(folder, state), stop, start)
        if request.is_dry_run:
            _print_plan(session, runs, configs)
            return 0
        with lock_sweep(folder):
            run_grid(session, runs, configs)
            return conclude(session, runs)


def run_grid(session: SweepSession, runs: Sequence[SweepRun], configs: Mapping[str, LoadedConfig]) -> None:
    """Start or continue every run that is due, and return when they have ended."""
    session.book.write()
    for run in runs:
        session.book.add(run)
    due = [run for run in runs if session.is_due(run)]
    session.log(f"{len(runs)} runs, {len(due)} to do, {session.plan.at_once} at once, in {session.folder}")
    session.wait_for_writers(runs)
    due = session.prepare(due, configs)
    session.run_all(GridSource(due), num_runs=len(due))


def conclude(session: SweepSession, runs: Sequence[SweepRun]) -> int:
    """Print the results, and return the exit code."""
    results, request = session.results(), session.request
    if request.as_json:
        facts = results_json(results, session.objective, folder=session.folder, page=session.folder / PAGE)
        print(format_json(facts, indent=2))
    else:
        print()
        print_table(results_table(results, session.objective, swept=session.book.state.swept))
        for line in closing_lines(results, session.objective, job=request.job, again=request.command):
            print(line)
    if session.stop.first is not None:
        return 128 + session.stop.first
    return int(any(session.book.outcome(run).state == FAILED for run in runs))


def _require_few(axes: Sequence[Axis], *, most: int) -> None:
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > most:
        raise UserError(
            f"--set: these values make {count:,} runs; at most {most:,} are started. Remove values, or confirm with "
            f"--max-runs {count}."
        )


def _print_plan(session: SweepSession, runs: Sequence[SweepRun], configs: Mapping[str, LoadedConfig]) -> None:
    """Print what would be started."""
    commands = {run.name: session.plan.command(run, configs[run.name]) for run in runs}
    if session.request.as_json:
        each = [{"name": run.name, "folder": str(run.folder), "command": commands[run.name]} for run in runs]
        print(json.dumps({"folder": str(session.folder), "at_once": session.plan.at_once, "runs": each}, indent=2))
        return
    print(f"{len(runs)} runs, {session.plan.at_once} at once, in {session.folder}")
    for run in runs:
        state = session.book.outcome(run).state if run.name in session.book.state.runs else "waiting"
        print(f"{run.name}: {state}\n  {shlex.join(commands[run.name])}")
