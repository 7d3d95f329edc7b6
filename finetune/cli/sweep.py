"""The command for several runs of one job: sweep."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Config, OptionalAccelerateFile
from finetune.cli.ranks import with_ranks
from finetune.runtime.optional import lazily

with lazily(freeze=True):
    from finetune.commands.sweep import sweep as sweep_command

Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=V1,V2,...",
        help="Values of a key; every combination is a run. Commas within brackets and quotes do not separate. "
        "With --search also a range: 1e-5..1e-3, log:1..100. Can be repeated.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, max=4096, metavar="N", help="Processes of each run. Default: 1, or as in the file."),
]
SweepFolder = Annotated[
    Path | None, typer.Option(metavar="SWEEP", help="Folder of the sweep. Default: run.folder with `-sweep`.")
]
AtOnce = Annotated[
    int | None,
    typer.Option(min=1, max=1024, metavar="K", help="Runs at once. Default: devices / processes; 1 without devices."),
]
Metric = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Metric that ranks the runs, such as accuracy, or rouge:maximize."),
]
Search = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Search with N runs (TPE, poor runs are pruned) instead of a grid."),
]
MaxRuns = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of runs to start.")]


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(sweep)


@handle_errors
@with_ranks
def sweep(
    config: Config,
    override: Values = None,
    processes_per_run: Processes = None,
    accelerate: OptionalAccelerateFile = None,
    folder: SweepFolder = None,
    at_once: AtOnce = None,
    metric: Metric = None,
    search: Search = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    max_runs: MaxRuns = 100,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start runs that failed again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run and print the commands.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: the host of its head, `auto`, or `local`."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; progress goes to stderr.")] = False,
) -> int:
    """Train a job once for each combination of values, and compare the runs.

    The same command continues a sweep that was interrupted: finished runs are not repeated, others resume from their
    checkpoints, and further values add runs. Exit code 1 if a run has failed.
    """
    request = sweep_command.SweepRequest(
        job=config,
        overrides=tuple(override or ()),
        processes_per_run=processes_per_run,
        accelerate=accelerate,
        folder=folder,
        at_once=at_once,
        metric=metric,
        search=search,
        seed=seed,
        max_runs=max_runs,
        retries_failed=retry_failed,
        is_dry_run=dry_run,
        as_json=json,
        ray=ray,
    )
    return sweep_command.sweep(request)
