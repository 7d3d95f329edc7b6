"""`finetune verify`: promises of the house, asked of the user's own job."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli import lazy
from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Config, Overrides
from finetune.errors import UserError

app = typer.Typer(help="Ask of your own job what the house promises.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def verify() -> None:
    """Ask of your own job what the house promises."""


@app.command()
@handle_errors
def parity(
    config: Config,
    strategies: Annotated[
        str, typer.Option(metavar="A,B:4", help="Names in accelerate_configs/, or paths; `:4` sets the processes.")
    ] = "ddp,fsdp2,zero2,zero3",
    processes: Annotated[int, typer.Option(min=1, help="Processes of each strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are compared.")] = 20,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest relative difference allowed.")] = 1e-4,
    accumulations: Annotated[
        str, typer.Option(metavar="N,M", help="Microbatches per step and process, each tried.")
    ] = "1",
    configs_folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the accelerate configs lie.")] = Path(
        "accelerate_configs"
    ),
    override: Overrides = None,
) -> int:
    """Compare the losses of all strategies.

    Runs the job's first steps on one process and under each strategy; exit code 1 unless all losses and gradient norms
    agree within the tolerance.
    """
    agree = lazy.call(
        "finetune.commands.verify.parity:run_parity",
        config,
        overrides=override or [],
        strategies=_words(strategies),
        processes=processes,
        steps=steps,
        tolerance=tolerance,
        accumulations=[_number(word) for word in _words(accumulations)],
        configs_folder=configs_folder,
    )
    return 0 if agree else 1


@app.command()
@handle_errors
def resume(
    config: Config,
    stop_at: Annotated[int, typer.Option(min=1, metavar="K", help="The step after which the second run is stopped.")],
    source: Annotated[
        str, typer.Option("--from", metavar="A:N", help="Strategy that is stopped: a name or a path; `:4` processes.")
    ] = "ddp:2",
    target: Annotated[str, typer.Option("--to", metavar="B:N", help="Strategy that goes on.")] = "ddp:2",
    steps: Annotated[
        int | None, typer.Option(min=2, help="The last step that is compared; unset, five after the stop.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest relative difference allowed where --from and --to differ.")
    ] = 1e-4,
    configs_folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the accelerate configs lie.")] = Path(
        "accelerate_configs"
    ),
    override: Overrides = None,
) -> int:
    """Compare a run that is stopped and resumed with one that is not.

    Runs the job straight, and again with a stop and another start, maybe under another strategy and on another number
    of processes. Exit code 1 unless every step has the same samples and losses within the tolerance. Where --from and
    --to are the same, losses and the final state must be equal bit by bit, dropout included; else dropout is off.
    """
    agree = lazy.call(
        "finetune.commands.verify.resume:run_resume",
        config,
        overrides=override or [],
        stop_at=stop_at,
        steps=steps,
        source=source,
        target=target,
        tolerance=tolerance,
        configs_folder=configs_folder,
    )
    return 0 if agree else 1


def _words(written: str) -> list[str]:
    return [word.strip() for word in written.split(",") if word.strip()]


def _number(word: str) -> int:
    if not word.isdigit() or int(word) == 0:
        raise UserError(f"--accumulations {word}: write whole numbers from 1 on, separated by commas, such as 1,2,4.")
    return int(word)
