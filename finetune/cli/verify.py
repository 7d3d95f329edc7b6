"""`finetune verify`: promises of the house, asked of the user's own job."""

from typing import Annotated

import typer

from finetune.cli import lazy
from finetune.cli.options import Config, Overrides
from finetune.cli.outcome import reported

app = typer.Typer(help="Ask of your own job what the house promises.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def verify() -> None:
    """Ask of your own job what the house promises."""


@app.command()
@reported
def parity(
    config: Config,
    strategies: Annotated[
        str, typer.Option(metavar="A,B", help="Names in accelerate_configs/, or paths, separated by commas.")
    ] = "ddp,fsdp2,zero2,zero3",
    processes: Annotated[int, typer.Option(min=1, help="Processes of each strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are compared.")] = 20,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest relative difference allowed.")] = 1e-4,
    override: Overrides = None,
) -> int:
    """Compare the losses of all strategies.

    Runs the job's first steps on one process and under each strategy; exit code 1 unless all losses and gradient norms
    agree within the tolerance.
    """
    agree = lazy.call(
        "finetune.advise.parity:run_parity",
        config,
        overrides=override or [],
        strategies=[name.strip() for name in strategies.split(",") if name.strip()],
        processes=processes,
        steps=steps,
        tolerance=tolerance,
    )
    return 0 if agree else 1
