"""The commands that prepare a job: `init`, `doctor`, `plan` and `rehearse`."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import with_ranks
from finetune.cli.options import AccelerateFile, Config, Overrides
from finetune.errors import UserError
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.doctor import doctor as doctor_command
    from finetune.commands.doctor import loader_speed as doctor_data
    from finetune.commands.init import init as init_command
    from finetune.commands.init import questions as questions_command
    from finetune.commands.plan import plan as plan_command
    from finetune.commands.rehearse import rehearse as rehearse_command

Prices = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of prices, in the form of the package's own.")
]
GpuTable = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML file of further GPU models, in the same form.")
]
Network = Annotated[float | None, typer.Option(min=0.001, metavar="GBIT", help="Network of each machine in Gbit/s.")]
Preemptions = Annotated[
    float | None, typer.Option(min=0.001, metavar="HOURS", help="Plan for spot machines, preempted this often.")
]


def add_before_training(app: typer.Typer) -> None:
    """Add the commands to the app."""
    for command in (init, doctor, plan, rehearse):
        app.command()(command)


def init(
    name: Annotated[str | None, typer.Argument(help="The recipe, such as `quickstart`.")] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to write to. Default: the name of the recipe or of the FILE."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also write an accelerate file: ddp, fsdp2, zero2, zero3, ...")
    ] = None,
    peer_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Make a job of a config of axolotl, TRL, LLaMA-Factory, ..."),
    ] = None,
    peer: Annotated[str | None, typer.Option(metavar="NAME", help="With --from: the trainer that it is for.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, max=1024, metavar="N", help="Number of GPUs; with --from, that it was used on.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Without a recipe: its task, as sft.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Without a recipe: the training rows.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Without a recipe, or for `quickstart`: a hub name or a folder.")
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Without a recipe: train LoRA adapters, or all weights.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="With --from: exit code 2 if keys are unknown.")] = False,
) -> int:
    """Write a recipe, a commented job file, to a folder. Without a name, ask five questions, or list the recipes.

    The questions are asked on a terminal only; --task, --data, --model, --gpus and --lora or --full answer them.

    The recipes `quickstart` and `image-digits` come with their data; `quickstart --model NAME` trains LoRA adapters on
    a pretrained model. With --from, the job is made of a config of
    another trainer: every key is mapped, or named with what to do instead (docs/how-to/migration.md).
    """
    answers = questions_command.InitAnswers(task=task, data=data, model=model, gpus=gpus, lora=lora)
    if peer_file is not None:
        if name is not None or strategy is not None:
            raise UserError("--from: leave out the recipe and --strategy; the accelerate file follows from the config.")
        return init_command.init_from(peer_file, into, peer=peer, gpus=gpus, is_strict=strict)
    if peer is not None or strict:
        raise UserError("--peer, --strict: they need --from FILE.")
    has_answers = answers != questions_command.InitAnswers()
    if name is None and (has_answers or strategy is None) and questions_command.is_asked(answers):
        questions_command.init_by_answers(answers, into, strategy=strategy)
        return 0
    if has_answers and answers != questions_command.InitAnswers(model=model):
        raise UserError("--task, --data, --gpus, --lora: they are for a job without a recipe. Leave it out.")
    init_command.init(name, into, strategy=strategy, model=model)
    return 0


@with_ranks
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="JOB.yaml", help="Also check what this job reads, writes and communicates."),
    ] = None,
    override: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Launched: how long to wait for the other ranks.")
    ] = 60.0,
    data: Annotated[
        bool, typer.Option("--data", help="Measure the job's data loader and recommend its settings.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="With --data: duration of each measurement.")] = 3.0,
) -> int:
    """Print what this machine has and what must be fixed before a run. Exit code 1 if anything must be fixed.

    On several processes, it also measures the link between them and compares their versions and clocks:
    accelerate launch --config_file ACCELERATE.yaml -m finetune doctor
    With --data: throughput of the job's data loader by number of workers.
    """
    if data and config is None:
        raise UserError("--data: add --config JOB.yaml, the job whose data loader is measured.")
    if data and json:
        raise UserError("--data: --json is for the check of a machine. Leave it out.")
    if data and config is not None:
        doctor_data.examine_loader(config, override or [], seconds=seconds)
        return 0
    return doctor_command.examine(config, override or [], as_json=json, wait_seconds=wait)


def plan(
    config: Config,
    override: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NxKIND", help="GPUs of each machine: 8xH100-80GB, several with commas. Default: its own."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=1 << 16, help="Number of such machines.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    prices: Prices = None,
    gpu_table: GpuTable = None,
    network_gbit: Network = None,
    time_between_preemptions: Preemptions = None,
) -> int:
    """Plan a job before paying for GPUs: what fits, how long a step and the job take, and what they cost.

    Memory is predicted by running the job's own step without weights, for every strategy. Exit code 1 where the job
    fits on none of the GPUs. What is assumed is printed, and explained in docs/how-to/planning.md.
    """
    options = plan_command.PlanOptions(
        gpus=gpus,
        num_nodes=nodes,
        prices=prices,
        gpu_table=gpu_table,
        network_gbit=network_gbit,
        hours_between_preemptions=time_between_preemptions,
    )
    return plan_command.plan(config, override or [], options, as_json=json)


def rehearse(
    config: Config,
    accelerate: AccelerateFile,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=2, max=1000, metavar="K", help="Steps to take.")] = 4,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the run, its logs and the small model in this folder.")
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, metavar="MINUTES", help="Kill everything after this time.")
    ] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    override: Overrides = None,
) -> int:
    """Rehearse a job of any size on this machine's CPU before GPUs are paid for.

    Checks both files for the real number of processes, makes the architecture small, reads real rows, takes a few
    steps under the strategy, kills the run, resumes it, exports and verifies the result. Prints what was made small,
    what was verified and what was not. Loads no weights and touches no run folder. See docs/how-to/before-a-run.md.
    """
    request = rehearse_command.RehearseRequest(
        config, tuple(override or ()), accelerate, processes, steps, keep, time_limit_minutes=time_limit
    )
    return rehearse_command.rehearse(request, is_json=json)
