"""`finetune rehearse`: the exact job and accelerate file on this machine's CPU, with a small copy of the model."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Config, Overrides
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.rehearse import rehearse as rehearse_command


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(rehearse)


@handle_errors
def rehearse(
    config: Config,
    accelerate: Annotated[
        Path, typer.Option("--accelerate", metavar="FILE", help="The accelerate file of the real launch.")
    ],
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=2, max=1000, metavar="K", help="Steps to take.")] = 4,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the run, its logs and the small model in this folder.")
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, metavar="MINUTES", help="Kill everything after this time.")
    ] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    override: Overrides = None,
) -> int:
    """Rehearse a job of any size on this machine's CPU before GPUs are paid for.

    Checks both files for the real number of processes, makes the architecture small, reads real rows, takes a few
    steps under the strategy, kills the run, resumes it, exports and proves the result. Prints what was made small,
    what was verified and what was not. Loads no weights and touches no run folder. See docs/rehearse.md.
    """
    request = rehearse_command.Request(
        config, tuple(override or ()), accelerate, processes, steps, keep, time_limit_minutes=time_limit
    )
    return rehearse_command.rehearse(request, is_json=json)
