"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.errors import UserError
from finetune.registry.accelerate_files import find_accelerate_file

Config = Annotated[Path, typer.Option("--config", metavar="JOB.yaml", help="The job file.")]

OptionalConfig = Annotated[Path | None, typer.Option("--config", metavar="JOB.yaml", help="A job that names plugins.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file, such as train.learning_rate=1e-4. Can be repeated.",
    ),
]

Source = Annotated[
    Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run folder, one of its checkpoints, or a model folder.")
]
Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="Step of the checkpoint. Default: the newest.")]
Dtype = Literal["float32", "bfloat16", "float16"]
ForEngine = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="Also write what vllm, sglang, llama.cpp or ollama needs: a GGUF file, a Modelfile, the command.",
    ),
]
GGUFType = Annotated[
    Literal["f16", "q8_0"], typer.Option("--gguf", help="Data type of the GGUF file for llama.cpp or ollama.")
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow Python code that comes with the model to run.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify",
        help="Compare the written folder, in a fresh process, with the exported weights. Default: as in the job.",
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens in an answer.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy decoding: always the most likely token.")
]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        metavar="NAME=VALUE",
        help="Argument of the chat template, such as enable_thinking=false. Can be repeated. Default: the arguments of "
        "the model's training.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message for conversations that have none of their own.")
]
SamplingSeed = Annotated[
    int, typer.Option(min=0, help="Seed of sampling. A row's answer does not depend on the number of processes.")
]
ConfigsFolder = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder of the accelerate configs; the package's come second.")
]


def _accelerate_file(written: str) -> Path:
    try:
        return find_accelerate_file(written)
    except UserError as error:
        raise typer.BadParameter(str(error)) from error


_ACCELERATE = typer.Option(
    "--accelerate",
    metavar="FILE_OR_NAME",
    parser=_accelerate_file,
    help="The accelerate file: a path, or a name such as ddp, fsdp2, zero2, zero3.",
)
AccelerateFile = Annotated[Path, _ACCELERATE]
OptionalAccelerateFile = Annotated[Path | None, _ACCELERATE]
