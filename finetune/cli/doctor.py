"""`finetune doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Overrides
from finetune.cli.ranks import with_ranks
from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.doctor import data as doctor_data
    from finetune.commands.doctor import doctor as doctor_command


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(doctor)


@handle_errors
@with_ranks
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="JOB.yaml", help="Check also what this job reads, writes and communicates."),
    ] = None,
    override: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
    facts: Annotated[
        Path | None,
        typer.Option("--facts", metavar="FILE.json", help="Check the facts that --json printed on another machine."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Launched: how long to wait for the other ranks.")
    ] = 60.0,
    data: Annotated[
        bool, typer.Option("--data", help="Measure the job's data loader and recommend its settings.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --data: rounds of measurements; medians are shown.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="With --data: duration of each measurement.")] = 0.5,
) -> int:
    """Print what this machine has and what must be fixed before a run. Exit code 1 if anything must be fixed.

    On several processes, it also measures the link between them and compares their versions and clocks:
    accelerate launch --config_file ACCELERATE.yaml -m finetune doctor
    With --data: throughput of the job's data loader by number of workers.
    """
    if data and config is None:
        raise UserError("--data: add --config JOB.yaml, the job whose data loader is measured.")
    if data and (json or facts is not None):
        raise UserError("--data: --json and --facts are for the check of a machine. Leave them out.")
    if facts is not None and (config is not None or override):
        raise UserError("--facts: the file has the facts of the job, too. Leave --config and --set out.")
    if data and config is not None:
        doctor_data.examine_loader(config, override or [], num_rounds=rounds, seconds=seconds)
        return 0
    return doctor_command.examine(config, override or [], recorded=facts, as_json=json, wait_seconds=wait)
