"""`finetune verify` and `finetune plugins`: test the guarantees of this package on your own job or plugin."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import with_ranks
from finetune.cli.options import Config, ConfigsFolder, Dtype, OptionalConfig, Overrides, Trust
from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily(freeze=True):
    from finetune.commands import plugins as plugins_command
    from finetune.commands.verify import replay as replay_command
    from finetune.commands.verify import runs as runs_command
    from finetune.commands.verify import serving as serving_command

HELP = "Test on your own job: the same losses under every strategy and after a resume, the same model when served."

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


@app.command()
def parity(
    config: Config,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B:4", help="Accelerate configs: names in accelerate_configs/ or paths; `:4` sets the processes."
        ),
    ] = "ddp,fsdp2,zero2,zero3",
    processes: Annotated[int, typer.Option(min=1, help="Processes per strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to compare.")] = 20,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Maximum relative difference.")] = 1e-4,
    accumulations: Annotated[
        str, typer.Option(metavar="N,M", help="Gradient accumulation steps to try with each strategy.")
    ] = "1",
    configs_folder: ConfigsFolder = Path("accelerate_configs"),
    override: Overrides = None,
) -> int:
    """Compare losses and gradient norms of the job under several strategies.

    Runs the first steps on one process and under each strategy. Exit code 1 unless every loss and gradient norm agrees
    with one process within the tolerance.
    """
    agree = runs_command.run_parity(
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
def resume(
    config: Config,
    stop_at: Annotated[int, typer.Option(min=1, metavar="K", help="Stop the second run after this step.")],
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="A:N", help="Strategy before the stop: a name or path; `:4` sets the processes."
        ),
    ] = "ddp:2",
    target: Annotated[str, typer.Option("--to", metavar="B:N", help="Strategy that resumes.")] = "ddp:2",
    steps: Annotated[
        int | None, typer.Option(min=2, help="Last step to compare. Default: five after the stop.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Maximum relative difference where --from and --to differ.")
    ] = 1e-4,
    configs_folder: ConfigsFolder = Path("accelerate_configs"),
    override: Overrides = None,
) -> int:
    """Compare a run that is stopped and resumed with one that is not interrupted.

    The resumed run can use another strategy and number of processes. Exit code 1 unless every step has the same samples
    and the losses agree within the tolerance. Where --from and --to are the same, losses and final state must be
    bitwise identical, dropout included; otherwise dropout is disabled.
    """
    agree = runs_command.run_resume(
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


@app.command()
@with_ranks
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to take again.")] = 5,
    start: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="N", help="Start from the checkpoint of this step, not from the model."),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Also compare layer outputs, of a run with `run.record_layers: true`; in bf16, changes above 1%.",
        ),
    ] = False,
    trust_remote_code: Trust = False,
    override: Overrides = None,
) -> int:
    """Take the first steps of a run again in the present environment, and compare them with its events.jsonl.

    On any strategy: accelerate launch --config_file ACCELERATE.yaml -m finetune verify replay RUN. Exit code 1, with
    the first step that differs and the packages that have changed, unless the samples and learning rates are equal, and
    losses and gradient norms within rounding. The run folder is not changed.
    """
    return replay_command.run_replay(
        run,
        num_steps=steps,
        start=start,
        layers=layers,
        overrides=override or (),
        trust_remote_code=trust_remote_code,
    )


@app.command()
def serving(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_FOLDER", help="A finished run, its `final/`, or a model or adapter folder."),
    ],
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME[:URL]",
            help="llama.cpp (reads the GGUF file in the folder, in this process), vllm, sglang, ollama (the address of "
            "the running server can follow: vllm:http://host:8000/v1), or openai:URL for any other server.",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Base model of a merged or full model, to measure what training changed."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows to compare. Default: the rows of the run, else synthetic ones."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the served model. Needed if the server has several.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Data type in which the engine computes. Default: that of the folder.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit of one request.")] = 120.0,
    trust_remote_code: Trust = False,
) -> int:
    """Compare a served model with the exported folder: tokens, stop ids, log-probabilities, effect, greedy answers.

    The reference is the folder under transformers in float32 on the CPU. Exit code 1 if anything differs by more than
    rounding explains. The result is written to serving.json next to the folder.
    """
    options = serving_command.ServingOptions(engine, base, rows, model, dtype, timeout, trust_remote_code)
    return 0 if serving_command.run_serving(folder, options) else 1


def _words(written: str) -> list[str]:
    return [word.strip() for word in written.split(",") if word.strip()]


def _number(word: str) -> int:
    if not word.isdigit() or int(word) == 0:
        raise UserError(f"--accumulations {word}: write positive integers separated by commas, such as 1,2,4.")
    return int(word)


plugins_app = typer.Typer(help="List plugins, and test one.", no_args_is_help=True, rich_markup_mode=None)


@plugins_app.command("list")
def list_plugins(config: OptionalConfig = None, override: Overrides = None) -> None:
    """List the plugins that are installed, from where, and conflicts; with --config also what the job imports.

    An installed plugin is imported only where a job names it. See docs/how-to/plugins.md.
    """
    plugins_command.list_plugins(config, override or [])


@plugins_app.command()
def test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that the plugin adds.")],
    config: Config,
    strategies: Annotated[
        str, typer.Option(metavar="A,B", help="Accelerate files: names such as fsdp2, or paths.")
    ] = "ddp,fsdp2,zero2,zero3",
    processes: Annotated[int, typer.Option(min=1, help="Processes per strategy.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 6,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Maximum relative difference.")] = 1e-4,
    override: Overrides = None,
) -> int:
    """Test a plugin: audit of its rows, parity under several strategies, and a resume under another one.

    Exit code 1 unless everything passes.
    """
    names = tuple(word.strip() for word in strategies.split(",") if word.strip())
    passes = plugins_command.test_plugin(
        name, config, override or [], strategies=names, processes=processes, steps=steps, tolerance=tolerance
    )
    return 0 if passes else 1
