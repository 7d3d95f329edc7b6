"""The commands. Each is typed words and one call."""

from pathlib import Path
from typing import Annotated

import typer

from finetune import __version__
from finetune.cli import after_training, checkpoint, lazy, verify
from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Config, Overrides
from finetune.errors import UserError

app = typer.Typer(
    name="finetune",
    help="Fine-tune transformer models on Hugging Face Accelerate: one job YAML, any strategy, the same loss.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich help costs start-up time and adds nothing
    pretty_exceptions_enable=False,  # a fault of ours keeps Python's own traceback, with no locals in it
)
app.add_typer(verify.app, name="verify")
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Fine-tune transformer models on Hugging Face Accelerate: one job YAML, any strategy, the same loss."""


@app.command()
@handle_errors
def train(config: Config, override: Overrides = None) -> int:
    """Train as the job file says.

    Under several processes: accelerate launch --config_file ACCELERATE.yaml -m finetune --config JOB.yaml
    """
    return int(lazy.call("finetune.cli.job:train_job", config, override or []))


@app.command()
@handle_errors
def check(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    override: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="Also check that so many can share the batch.")
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="Also build the model from its config, without memory. Imports torch.")
    ] = False,
) -> None:
    """Name every problem of a job file at once.

    Where there is none, say what the job will do. Loads no weights and no data.
    """
    lazy.call("finetune.cli.job:check_job", job, override or [], num_processes=processes, tries_model=model)


@app.command()
@handle_errors
def prepare(config: Config, override: Overrides = None) -> None:
    """Tokenise the data now, on the CPU, so that training finds it.

    Needs no model weights and no launcher. Goes on where it was stopped, and ends with the audit.
    """
    lazy.call("finetune.commands.prepare:prepare", config, override or [])


@app.command()
@handle_errors
def preview(
    config: Config,
    override: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Samples to show.")] = 8,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write them and the audit as one HTML page, too.")
    ] = None,
    start: Annotated[
        int, typer.Option("--from", min=0, metavar="POSITION", help="Position of the order to begin at, from 0.")
    ] = 0,
) -> None:
    """Show the rows as the model sees them: tokens, what is learnt, packs and microbatches.

    Prepares the data as training would, and ends with the audit. Needs no model weights and no launcher.
    """
    lazy.call(
        "finetune.commands.preview.preview:preview", config, override or [], num_rows=rows, html=html, start=start
    )


@app.command()
@handle_errors
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="JOB.yaml", help="The job whose folders or data are meant.")
    ] = None,
    override: Overrides = None,
    data: Annotated[bool, typer.Option("--data", help="Measure the job's loader and say what to set.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --data: rounds, of which medians are taken.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="With --data: how long each measurement takes.")] = 0.5,
) -> int:
    """Say what this machine has and what must be mended; exit code 1 if anything must.

    With --data: samples per second of the job's loader against the number of its workers.
    """
    if not data:
        return 0 if lazy.call("finetune.commands.doctor.doctor:examine", config, override or []) else 1
    if config is None:
        raise UserError("--data: write --config JOB.yaml too: it is that job's loader that is measured.")
    lazy.call(
        "finetune.commands.doctor.data:examine_loader", config, override or [], num_rounds=rounds, seconds=seconds
    )
    return 0


@app.command()
@handle_errors
def reference() -> None:
    """Print the page of all keys."""
    print(lazy.call("finetune.config.schema:reference_markdown"), end="")


@app.command()
@handle_errors
def schema() -> None:
    """Print the JSON schema of a job file, for editors."""
    print(lazy.call("finetune.config.schema:json_schema"), end="")


@app.command()
@handle_errors
def init(
    name: Annotated[str | None, typer.Argument(help="The recipe, such as `quickstart`.")] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write into; unset, one of the recipe's name.")
    ] = None,
) -> None:
    """Write a commented job file into a folder.

    The quickstart and image-digits bring their data along. Without a name, the recipes are listed.
    """
    if name is None:
        known = lazy.call("finetune.recipes.make:recipes")
        widest = max(map(len, known)) + 2
        for recipe, sentence in known.items():
            print(f"{recipe:<{widest}}{sentence}")
        return
    paths = lazy.call("finetune.recipes.make:make_recipe", name, into or Path(name))
    for each in lazy.call("finetune.recipes.make:format_written", paths):
        print(f"wrote {each}")


after_training.add_to(app)
