"""`finetune checkpoint`: look at a run's checkpoints, check, thin out, convert and export them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.cli import lazy
from finetune.cli.exit_codes import handle_errors
from finetune.errors import UserError

HELP = "Look at a run's checkpoints; check, prune, convert and export them."

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


def _folder(written: str) -> Path:
    """Return the folder that is meant; of a run at a URL, where it is staged on this machine by default."""
    return (
        Path(lazy.call("finetune.config.paths:local_run_folder", written, None)) if "://" in written else Path(written)
    )


Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", parser=_folder, help="A run's folder (or URL), its `checkpoints/`, or one checkpoint in it."
    ),
]
Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="The checkpoint of this step; unset, the newest.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def checkpoint() -> None:
    """Look at a run's checkpoints; check, prune, convert and export them."""


@app.command()
@handle_errors
def ls(
    run: Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare its digest.")] = False,
    json: Json = False,
) -> None:
    """List a run's checkpoints: step, size, age, metrics, who wrote them, whether they are whole.

    What saves, resumes and prunes have left beside them is named below.
    """
    lazy.call("finetune.commands.checkpoints.inspect:list_checkpoints", run, verifies=verify, as_json=json)


@app.command()
@handle_errors
def show(run: Run, step: Step = None, json: Json = False) -> None:
    """Show everything about one checkpoint.

    The state digest is equal for two checkpoints of the same training state, whoever wrote them: parameters, optimizer
    state, step and samples.
    """
    lazy.call("finetune.commands.checkpoints.inspect:show_checkpoint", run, step=step, as_json=json)


@app.command()
@handle_errors
def verify(
    run: Run,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The checkpoint of this step; unset, all of them.")
    ] = None,
) -> int:
    """Read every file and compare its digest.

    Names each bad file and the tensors in it. Exit code 1 if any is bad.
    """
    return 0 if lazy.call("finetune.commands.checkpoints.inspect:verify_checkpoints", run, step=step) else 1


@app.command()
@handle_errors
def prune(
    run: Run,
    keep_last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep so many of the newest.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep those of every so many steps.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Keep the best: `loss`, `loss:2` (two), `exact_match:maximize`."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what would be deleted.")] = False,
) -> None:
    """Say which checkpoints would go, and with --yes delete them.

    What is not given is as the run's own settings say. The newest good checkpoint and the best ones stay in any case;
    bad ones are left alone. Refused while a run is writing the folder.
    """
    lazy.call(
        "finetune.commands.checkpoints.prune:prune",
        run,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        does_delete=yes,
    )


@app.command()
@handle_errors
def export(
    run: Run,
    step: Step = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write; unset, `exports/` in the run's.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; unset, what the run's `export` section says."),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, like the `final/` of a finished run.

    On the CPU, in one process, whichever launcher wrote the checkpoint. The run's data is not needed; its base model
    is, where it has one.
    """
    lazy.call(
        "finetune.commands.export:export_checkpoint",
        run,
        step=step,
        to=to,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


@app.command()
@handle_errors
def convert(
    run: Run,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write a checkpoint into this new folder.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Read this folder into a checkpoint of the run.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Which checkpoint; with --from, after how many steps it was taken."),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that comes with the model, or in a pickled folder."),
    ] = False,
) -> int:
    """Convert to and from the folder of Accelerate's save_state: DeepSpeed's own folder under DeepSpeed.

    Such a folder belongs to the launched strategy and number of processes, and is read back by the same:

    accelerate launch --config_file ACCELERATE.yaml -m finetune checkpoint convert RUN --to FOLDER

    It does not hold the data position. With --from, the position and the digest of the samples follow from --step and
    the order of the run's data. Under DeepSpeed and FSDP reading such a folder unpickles it, which can run code: only
    with --trust-remote-code.
    """
    if (to is None) == (source is None):
        raise UserError("convert: write exactly one of --to FOLDER and --from FOLDER.")
    if source is not None and step is None:
        raise UserError("--from: write --step N too: such a folder does not say after how many steps it was taken.")
    named = {"to": to, "source": source, "step": step, "trust_remote_code": trust_remote_code}
    return int(lazy.call("finetune.commands.convert:convert", run, **named))
