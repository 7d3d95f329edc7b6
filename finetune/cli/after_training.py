"""The commands for trained models: export, evaluate, generate, chat."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.cli import lazy
from finetune.cli.exit_codes import handle_errors
from finetune.cli.options import Overrides
from finetune.errors import UserError

Source = Annotated[
    Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run's folder, one of its checkpoints, or a model folder.")
]
Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="The checkpoint of this step; unset, the newest.")]
NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0: always the likeliest token; above, tokens are drawn, the wilder the higher.")
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message, where a row has none.")]


def add_to(app: typer.Typer) -> None:
    """Give the commands to the app."""
    for command in (export, evaluate, generate, chat):
        app.command()(command)


@handle_errors
def export(
    source: Source,
    step: Step = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write; unset, one beside or in the source.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base: one whole model.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Type of the weights; unset, as they are.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPOSITORY", help="Also upload it, with the token of HF_TOKEN or a login.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make that repository public where it is new.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a checkpoint's model, or any adapter merged into its base, as a Hugging Face folder.

    RUN_OR_FOLDER is a run (its newest checkpoint, or that of --step) or any folder with a model or a peft adapter.
    Merging is exact: worked out in 64 bits and rounded once. On the CPU, in one process.
    """
    lazy.call(
        "finetune.commands.export:export",
        source,
        step=step,
        to=to,
        dtype=dtype,
        merge=merge,
        push_to_hub=push_to_hub,
        public=public,
        trust_remote_code=trust_remote_code,
    )


@handle_errors
def evaluate(
    source: Source,
    step: Step = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="JOB.yaml", help="The job that says task and data; unset, the run's own."),
    ] = None,
    override: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the metrics here.")] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASKS", help="Measure these tasks of lm-eval instead.")
    ] = None,
    trust_remote_code: Trust = False,
) -> int:
    """Measure a checkpoint, a `final/` or any model folder on the job's validation rows.

    With several processes the rows are shared, each counted once; the model is whole in each:
    accelerate launch --config_file ACCELERATE.yaml -m finetune evaluate RUN
    """
    if lm_eval is not None and (config is not None or override):
        raise UserError("--lm-eval: its tasks bring their own data. Leave --config and --set out.")
    if lm_eval is not None:
        named = {"step": step, "tasks": lm_eval, "json": json, "trust_remote_code": trust_remote_code}
        lazy.call("finetune.commands.evaluate.lm_eval:evaluate_with_harness", source, **named)
        return 0
    return int(
        lazy.call(
            "finetune.commands.evaluate.evaluate:evaluate",
            source,
            step=step,
            config=config,
            overrides=override or [],
            json=json,
            trust_remote_code=trust_remote_code,
        )
    )


@handle_errors
def generate(
    source: Source,
    input: Annotated[
        Path, typer.Option("--input", metavar="PROMPTS.jsonl", help="Rows with `messages` or `prompt` (text or turns).")
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="ANSWERS.jsonl", help="The same rows, each with its `answer`.")
    ],
    adapter: Annotated[
        Path | None, typer.Option("--adapter", metavar="FOLDER", help="An adapter to put on the model.")
    ] = None,
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts at once in each process.")] = 8,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn; each row has its own, whoever answers it.")] = 0,
    system: System = None,
    trust_remote_code: Trust = False,
) -> int:
    """Answer every row of a file, in its order; stopped, it goes on where it was.

    With several processes each answers its share, the model whole in each of them, whatever the strategy:
    accelerate launch --config_file ACCELERATE.yaml -m finetune generate FOLDER --input P.jsonl --output A.jsonl
    """
    return int(
        lazy.call(
            "finetune.commands.generate:generate_file",
            source,
            rows=input,
            output=output,
            adapter=adapter,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            system=system,
            trust_remote_code=trust_remote_code,
        )
    )


@handle_errors
def chat(
    folder: Annotated[Path, typer.Argument(help="A run's folder, its `final/`, or any model folder.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="An adapter that `/adapter NAME` switches to. May be given again."),
    ] = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    system: System = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to a model that a run left behind."""
    lazy.call(
        "finetune.commands.chat:chat",
        folder,
        adapters=adapter or [],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        system=system,
        trust_remote_code=trust_remote_code,
    )
