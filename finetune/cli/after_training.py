"""The commands for trained models and runs: export, evaluate, generate, chat, report, compare."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import with_ranks
from finetune.cli.options import (
    Dtype,
    ForEngine,
    GGUFType,
    NewTokens,
    Overrides,
    SamplingSeed,
    Source,
    Step,
    System,
    Temperature,
    TemplateArguments,
    Trust,
    Verify,
)
from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands import chat as chat_command
    from finetune.commands import evaluate as evaluate_command
    from finetune.commands import export as export_command
    from finetune.commands import generate as generate_command
    from finetune.commands import serving_files as serving_files_command
    from finetune.commands.compare import compare as compare_command
    from finetune.commands.gate import gate as gate_command


def add_after_training(app: typer.Typer) -> None:
    """Add the commands to the app."""
    for command in (export, evaluate, generate, chat, report, compare):
        app.command()(command)


def export(
    source: Source,
    step: Step = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to write. Default: a new one in or next to the source."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base model.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Data type of the weights. Default: the type that they have.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPOSITORY", help="Also upload it to the Hugging Face Hub, with HF_TOKEN or your login."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create the repository as public, not private.")] = False,
    engine: ForEngine = None,
    gguf: GGUFType = "f16",
    trust_remote_code: Trust = False,
    verify: Verify = True,
) -> None:
    """Write a checkpoint, or an adapter merged into its base, as a Hugging Face model folder.

    RUN_OR_FOLDER is a run (its newest checkpoint, or that of --step) or any folder with a model or a PEFT adapter.
    Merging is computed in float64 and rounded once. Runs on the CPU; a second process loads what was written and
    compares it. With --for, a finished run's `final/` is used as it is unless another option changes it.
    """
    command: Callable[..., Path] = export_command.export
    if engine is not None:
        command = partial(serving_files_command.export_for, engine_name=engine, gguf_type=gguf)
    command(
        source,
        step=step,
        to=to,
        dtype=dtype,
        merge=merge,
        push_to_hub=push_to_hub,
        public=public,
        trust_remote_code=trust_remote_code,
        verify=None if verify else False,
    )


Against = Annotated[
    str | None,
    typer.Option(
        metavar="BASE_OR_FOLDER",
        help="Compare with `base` (the model that the job starts from), a run or a model folder, row by row. The exit "
        "code is 1 unless it is better.",
    ),
]
Margin = Annotated[
    float | None, typer.Option(min=0.0, metavar="NATS", help="With --against: the least gain in loss. Default: 0.01.")
]
MaxForgetting = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="With --against: how many tokens of the other model's answers to general rows may change. Default: 0.3.",
    ),
]
General = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="With --against: general rows, each with `text` or `messages`. Default: 40 of our own."
    ),
]


@with_ranks
def evaluate(
    source: Source,
    step: Step = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="JOB.yaml", help="Job with the task and the data. Default: the run's own."),
    ] = None,
    override: Overrides = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the metrics to this JSON file.")
    ] = None,
    against: Against = None,
    margin: Margin = None,
    max_forgetting: MaxForgetting = None,
    general: General = None,
    trust_remote_code: Trust = False,
) -> int:
    """Evaluate a checkpoint, a `final/` or any model folder on the validation data of a job.

    With --against it is a release gate: is the model better than its base, and what has it forgotten?

    On several processes, each evaluates a share of the samples with a full copy of the model:
    accelerate launch --config_file ACCELERATE.yaml -m finetune evaluate RUN
    """
    if against is not None:
        limits = {
            "margin": 0.01 if margin is None else margin,
            "max_forgetting": 0.3 if max_forgetting is None else max_forgetting,
        }
        options = gate_command.GateOptions(**limits, general=general, json=json)
        return gate_command.evaluate_against(
            source,
            against=against,
            step=step,
            config=config,
            overrides=override or [],
            options=options,
            trust_remote_code=trust_remote_code,
        )
    for name, value in {"margin": margin, "max-forgetting": max_forgetting, "general": general}.items():
        if value is not None:
            raise UserError(f"--{name} belongs to a comparison: add --against, or leave it out.")
    return evaluate_command.evaluate(
        source,
        step=step,
        config=config,
        overrides=override or [],
        json=json,
        trust_remote_code=trust_remote_code,
    )


@with_ranks
def generate(
    source: Source,
    input: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="ROWS.jsonl",
            help="Rows with `messages` or `prompt` (a text or messages); of other tasks, rows as for training, which "
            "need no label.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="ANSWERS.jsonl", help="File to write: the same rows, with `answer` or `prediction`."
        ),
    ],
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="PEFT adapter to load on the model.")] = None,
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts per batch, in each process.")] = 8,
    temperature: Temperature = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: SamplingSeed = 0,
    system: System = None,
    template_argument: TemplateArguments = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of every class.")
    ] = False,
    trust_remote_code: Trust = False,
) -> int:
    """Generate an answer to every row of a file, in its order; an interrupted command resumes where it stopped.

    Models that do not generate text write a prediction: class, tags, number, vector or scores.

    On several processes, each answers a share of the rows with a full copy of the model:
    accelerate launch --config_file ACCELERATE.yaml -m finetune generate FOLDER --input P.jsonl --output A.jsonl
    """
    return generate_command.generate_file(
        source,
        rows=input,
        output=output,
        options=generate_command.GenerationOptions(
            adapter=adapter,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            system=system,
            template_arguments=template_argument or [],
            probabilities=probabilities,
            trust_remote_code=trust_remote_code,
        ),
    )


def chat(
    source: Source,
    step: Step = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="Adapter that `/adapter NAME` switches to. Can be repeated."),
    ] = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    system: System = None,
    template_argument: TemplateArguments = None,
    trust_remote_code: Trust = False,
) -> None:
    """Chat with a trained model: a run (finished or stopped), one of its checkpoints, or any model folder."""
    chat_command.chat(
        source,
        step=step,
        adapters=adapter or [],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        system=system,
        template_arguments=template_argument or [],
        trust_remote_code=trust_remote_code,
    )


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or not.")]) -> None:
    """Write report.html of a run again: one page with its curves, answers, data and config.

    Training writes it, too, while it runs. See docs/how-to/reports.md.
    """
    compare_command.report(run)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare runs: results, config and environment, and whether their losses are the same.

    Works on unfinished runs, too. See docs/how-to/reports.md.
    """
    compare_command.compare_runs(runs, html=html, json=json)
