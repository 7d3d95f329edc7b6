"""`finetune launch`: one job on several hosts."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.cli.launch import jobs
from finetune.cli.options import Config, Overrides
from finetune.runtime.optional import lazily

with lazily(freeze=True):
    from finetune.commands.launch import torchrun as torchrun_command
    from finetune.launch.supervisor import supervise as supervisor

HELP = "Launch a job on several hosts, or write its job file for a scheduler."

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def launch() -> None:
    """Launch a job on several hosts, or write its job file for a scheduler."""


Nodes = Annotated[str, typer.Option(metavar="N or LEAST:MOST", help="Number of hosts, or the least and the most.")]
Supervised = Annotated[
    bool,
    typer.Option(
        "--supervise",
        help="Run on this host, with the supervisors of the other hosts: when a host is lost the run continues without "
        "it from the newest checkpoint, when one comes it takes part. Start the same command on each host.",
    ),
]
HostName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of this host, different on each. Default: the hostname.")
]
Interface = Annotated[
    str | None, typer.Option(help="Network interface that leads to the other hosts. Default: the first.")
]
SharedFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where supervisors meet; shared by all hosts. Default: the run folder."),
]
LostAfter = Annotated[
    float, typer.Option(min=2.0, metavar="SECONDS", help="A host that is silent for so long is lost.")
]
Join = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="SECONDS", help="At the start, wait this long for more than the minimum number of hosts."
    ),
]
Stop = Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Ranks that are to stop may save for so long.")]


@app.command()
@handle_errors
def torchrun(
    config: Config,
    accelerate: Annotated[Path, typer.Option(metavar="FILE", help="The accelerate file.")],
    nodes: Nodes,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=1024, help="Processes on each host, one per GPU.")],
    supervised: Supervised = False,
    name: HostName = None,
    interface: Interface = None,
    shared_folder: SharedFolder = None,
    lost_after: LostAfter = 30.0,
    join: Join = 60.0,
    stop: Stop = 180.0,
    override: Overrides = None,
) -> int:
    """Print the command of each host, or with --supervise run the job on hosts that come and go.

    The global batch, the order of the samples and the loss stay as they are on any number of hosts.
    """
    limits = torchrun_command.read_limits(nodes)
    job, loaded = torchrun_command.make_job(
        config, override or [], accelerate_file=accelerate, ranks_per_host=gpus_per_node, stop_seconds=stop
    )
    if not supervised:
        torchrun_command.print_commands(job, loaded, limits)
        return 0
    here = torchrun_command.LocalHost(name, interface, shared_folder)
    timing = supervisor.Timing(lost_after=lost_after, join=join)
    return torchrun_command.supervise_job(job, loaded, limits, here=here, timing=timing)


jobs.add_to(app)
