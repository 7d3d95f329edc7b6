"""`finetune plan`: what a job takes, how long it trains and what that costs."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Config, Overrides
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.plan import outlook as plan_outlook
    from finetune.commands.plan import plan as plan_command


def add_to(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(plan)


Gpus = Annotated[
    str | None,
    typer.Option(metavar="NxKIND", help="GPUs of each machine: 8xH100-80GB, several with commas. Default: its own."),
]
Nodes = Annotated[int | None, typer.Option(min=1, max=1 << 16, help="Number of such machines.")]
Prices = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of prices, in the form of the package's own.")
]
GpuTable = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of further kinds of GPUs, in that form, too.")
]
Network = Annotated[float | None, typer.Option(min=0.001, metavar="GBIT", help="Network of each machine in Gbit/s.")]
Disk = Annotated[float, typer.Option(min=0.001, metavar="GB", help="GB/s that checkpoints are written with.")]
Preemptions = Annotated[
    float | None, typer.Option(min=0.001, metavar="HOURS", help="Mean time between two preemptions of the job.")
]
Restart = Annotated[float, typer.Option(min=0.0, metavar="MINUTES", help="From a preemption to the next step.")]


@handle_errors
def plan(
    config: Config,
    override: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    prices: Prices = None,
    gpu_table: GpuTable = None,
    network_gbit: Network = None,
    disk: Disk = 1.0,
    time_between_preemptions: Preemptions = None,
    restart_minutes: Restart = 10.0,
) -> int:
    """Plan a job before paying for GPUs: what fits, how long a step and the job take, and what they cost.

    Memory is predicted by running the job's own step without weights, for every strategy. Exit code 1 where the job
    fits on none of the GPUs. What is assumed is printed, and explained in docs/planning.md.
    """
    options = plan_command.PlanOptions(
        gpus=gpus,
        num_nodes=nodes,
        prices=prices,
        gpu_table=gpu_table,
        network_gbit=network_gbit,
        assumed=plan_outlook.Assumed(
            hours_between_preemptions=time_between_preemptions,
            disk_bandwidth=disk * 1e9,
            restart_seconds=restart_minutes * 60,
        ),
    )
    return plan_command.plan(config, override or [], options, as_json=json)
