"""The commands. Each is typed words and one call."""

from pathlib import Path
from typing import Annotated

import typer

from finetune import __version__
from finetune.cli import after_training, before_training, checkpoint, launch, verify
from finetune.cli.exit_codes import CommandGroup, with_ranks
from finetune.cli.options import Config, OptionalAccelerateFile, OptionalConfig, Overrides
from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch and pydantic: `--help` answers at once
    from finetune.commands import check as check_command
    from finetune.commands import prepare as prepare_command
    from finetune.commands.launch import torchrun as torchrun_command
    from finetune.commands.preview import file as preview_file_command
    from finetune.commands.preview import preview as preview_command
    from finetune.config import load as config_load
    from finetune.config import schema as config_schema
    from finetune.run import start as train_command

app = typer.Typer(
    name="finetune",
    cls=CommandGroup,
    help="Fine-tune transformer models on Hugging Face Accelerate: one job YAML, any strategy, the same loss.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich help costs start-up time and adds nothing
    pretty_exceptions_enable=False,  # a bug keeps Python's own traceback, with no locals in it
)
app.add_typer(verify.app, name="verify")
app.add_typer(verify.plugins_app, name="plugins")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(launch.app, name="launch")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune transformer models on Hugging Face Accelerate: one job YAML, any strategy, the same loss."""


@app.command()
@with_ranks
def train(
    config: Config,
    override: Overrides = None,
    accelerate: OptionalAccelerateFile = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Start N processes on this host; under DDP without --accelerate."),
    ] = None,
) -> int:
    """Train as the job file says, or resume the run that it started.

    On several processes: accelerate launch --config_file ACCELERATE.yaml -m finetune --config JOB.yaml, or
    --processes N here, or torchrun, srun or mpirun with --accelerate.
    """
    if processes is not None and (processes > 1 or accelerate is not None):
        return torchrun_command.train_on_ranks(
            config, override or [], num_processes=processes, accelerate_file=accelerate
        )
    return train_command.start(config, override or [], accelerate_file=accelerate)


@app.command()
def check(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    override: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="Also check that N processes can divide the global batch.")
    ] = None,
    accelerate: OptionalAccelerateFile = None,
    model: Annotated[
        bool,
        typer.Option("--model", help="Also build the model from its config, without weights or memory. Imports torch."),
    ] = False,
) -> None:
    """Report every problem of a job file at once, or print what the job will do.

    Loads no weights and no data.
    """
    check_command.check(job, override or [], num_processes=processes, accelerate_file=accelerate, tries_model=model)


@app.command()
def prepare(config: Config, override: Overrides = None) -> None:
    """Tokenize the data now, on the CPU, and print its audit; training then uses the cached result.

    Needs no model weights and no launcher. A command that was interrupted resumes where it stopped.
    """
    prepare_command.prepare(config, override or [])


@app.command()
def preview(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Without a job: a file of rows, a folder, a glob in quotes or a URL."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="JOB.yaml", help="The job file.")] = None,
    override: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Number of samples to show.")] = 8,
    start: Annotated[
        int, typer.Option("--from", min=0, metavar="POSITION", help="Start at this position of the data order.")
    ] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With FILE: count tokens with this tokenizer, a hub name or a folder."),
    ] = None,
) -> None:
    """Show the samples as the model sees them: tokens, targets of the loss, packs and microbatches.

    Tokenizes the data as training would, and prints its audit. Needs no model weights and no launcher. With FILE
    instead of a job: columns and rows of any file, how it would be read, and the lines of a job that read it.
    """
    if file is not None:
        if config is not None or override or start:
            raise UserError("preview: --config, --set and --from are for a job. Leave them out, or FILE.")
        preview_file_command.preview_file(file, num_rows=rows, tokenizer=tokenizer)
    elif config is None:
        raise UserError("preview: write --config JOB.yaml, or a FILE of rows.")
    elif tokenizer is not None:
        raise UserError("--tokenizer: the job names its tokenizer. Leave it out.")
    else:
        preview_command.preview(config, override or [], num_rows=rows, start=start)


@app.command()
def reference(
    config: OptionalConfig = None,
    into: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write a page per section here instead.")] = None,
) -> None:
    """Print the reference of all keys of a job file, as Markdown; with --config, also of the job's plugins."""
    if config is not None:
        config_load.load_config(config)  # its plugins add their keys
    if into is None:
        print(config_schema.reference_markdown(), end="")
    else:
        config_schema.write_reference(into)


@app.command()
def agents() -> None:
    """Print how an agent writes, checks, plans, rehearses and runs a job."""
    print((Path(__file__).parents[1] / "AGENTS.md").read_text(encoding="utf-8"), end="")


@app.command()
def schema(config: OptionalConfig = None) -> None:
    """Print the JSON schema of a job file, for editors; with --config, with the keys of the job's plugins."""
    if config is not None:
        config_load.load_config(config)  # its plugins add their keys
    print(config_schema.json_schema(), end="")


after_training.add_after_training(app)
before_training.add_before_training(app)
app.command()(launch.sweep)
