"""`finetune checkpoint`: list, verify, prune and export the checkpoints of a run."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.options import Dtype, Step, Trust, Verify
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch where the command needs it
    from finetune.commands import checkpoints as checkpoint_command
    from finetune.commands import export as export_command
    from finetune.config import paths as config_paths

HELP = "List, verify, prune and export the checkpoints of a run."

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


def _folder(written: str) -> Path:
    """Return the folder; for a run at a URL, its default local folder on this machine."""
    return config_paths.local_run_folder(written, None) if "://" in written else Path(written)


Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", parser=_folder, help="A run folder (or URL), its `checkpoints/`, or one checkpoint."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ls(
    run: Run,
    verify: Annotated[bool, typer.Option("--verify", help="Also verify the checksum of every file.")] = False,
    json: Json = False,
) -> None:
    """List the checkpoints of a run: step, size, age, metrics, strategy, and whether they are complete.

    Leftovers of interrupted saves, resumes and prunes are listed below the table.
    """
    checkpoint_command.list_checkpoints(run, verifies=verify, as_json=json)


@app.command()
def show(run: Run, step: Step = None) -> None:
    """Show the details of one checkpoint.

    The state digest covers parameters, optimizer state, step and samples. It is equal for equal training states,
    whatever strategy wrote them.
    """
    checkpoint_command.show_checkpoint(run, step=step)


@app.command("verify")
def verify_checkpoints(
    run: Run,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Step of the checkpoint. Default: all checkpoints.")
    ] = None,
) -> int:
    """Verify the checksum of every file.

    Lists each damaged file and the tensors in it. Exit code 1 if any file is damaged.
    """
    return 0 if checkpoint_command.verify_checkpoints(run, step=step) else 1


@app.command()
def prune(
    run: Run,
    keep_last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep the N newest.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep those at every N steps.")] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Keep the best: `loss`, `loss:2` (two of them), `exact_match:maximize`."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would be deleted.")] = False,
) -> None:
    """Show which checkpoints would be deleted, and with --yes delete them.

    Options that are not given default to the run's own settings. The newest good checkpoint and the best ones are
    always kept; damaged ones are not touched. Refused while a run is writing to the folder.
    """
    checkpoint_command.prune(
        run,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        does_delete=yes,
    )


@app.command("export")
def export_checkpoint(
    run: Run,
    step: Step = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write. Default: one in `exports/` of the run.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Data type of the weights. Default: that of the run's `export` section.")
    ] = None,
    trust_remote_code: Trust = False,
    verify: Verify = True,
) -> None:
    """Write the model of a checkpoint as a Hugging Face model folder, like the `final/` of a finished run.

    Runs on the CPU in one process, whatever strategy wrote the checkpoint. Needs the base model where the run has one,
    but not its data.
    """
    export_command.export_checkpoint(
        run,
        step=step,
        to=to,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        verify=None if verify else False,
    )
