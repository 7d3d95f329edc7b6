"""Jobs on several hosts (`finetune launch`), their job files for schedulers, and several runs of a job (`sweep`)."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from finetune.cli.exit_codes import with_ranks
from finetune.cli.options import AccelerateFile, Config, OptionalAccelerateFile, Overrides
from finetune.runtime.optional import lazily, require

with lazily(freeze=True):
    from finetune.commands.launch import attempt_end, job_files
    from finetune.commands.launch import kubernetes as kubernetes_command
    from finetune.commands.launch import ray as ray_command
    from finetune.commands.launch import slurm as slurm_command
    from finetune.commands.launch import torchrun as torchrun_command
    from finetune.commands.sweep import sweep as sweep_command

Text = str | None
Texts = list[str] | None

Nodes = Annotated[int, typer.Option(min=1, max=1 << 16, metavar="N", help="Number of hosts.")]
Gpus = Annotated[int, typer.Option(min=1, max=1024, metavar="G", help="GPUs of each host; one process for each.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the job file here instead of printing it.")]
Environment = Annotated[
    Texts, typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of all ranks. Can be repeated.")
]
MaxRestarts = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Give up after N restarts in a row without a new checkpoint."),
]
Stop = Annotated[
    int, typer.Option(min=30, max=86_400, metavar="SECONDS", help="Time for ranks to save when they are stopped.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Request no GPUs; --gpus-per-node then counts processes.")]

app = typer.Typer(
    help="Launch a job on several hosts, or write its job file for a scheduler.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def torchrun(
    config: Config,
    accelerate: AccelerateFile,
    nodes: Nodes,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=1024, help="Processes on each host, one per GPU.")],
    override: Overrides = None,
) -> int:
    """Print the command of each host."""
    job, loaded = job_files.make_job(config, override or [], accelerate_file=accelerate, ranks_per_host=gpus_per_node)
    torchrun_command.print_commands(job, loaded, num_hosts=nodes)
    return 0


@app.command(short_help="Print a batch script for Slurm.")
def slurm(
    config: Config,
    accelerate: AccelerateFile,
    nodes: Nodes,
    gpus_per_node: Gpus,
    override: Overrides = None,
    output: Output = None,
    env: Environment = None,
    max_restarts: MaxRestarts = 3,
    stop: Stop = 180,
    cpu: Cpu = False,
    partition: Annotated[Text, typer.Option(help="Partition.")] = None,
    account: Annotated[Text, typer.Option(help="Account that is charged.")] = None,
    time: Annotated[Text, typer.Option(metavar="[D-]H:M:S", help="Time limit; the job saves before it ends.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="CPU cores of each host.")] = None,
    sbatch: Annotated[Texts, typer.Option(metavar="--OPTION=VALUE", help="Further directive. Can be repeated.")] = None,
    setup: Annotated[
        Texts,
        typer.Option(
            metavar="LINE",
            help="Line of the script, such as `module load cuda`; in "
            "place of the virtual environment of this command. Can be repeated.",
        ),
    ] = None,
    env_file: Annotated[Path | None, typer.Option(metavar="FILE", help="NAME=VALUE lines of mode 0600.")] = None,
    container: Annotated[Text, typer.Option(metavar="IMAGE", help="Run the ranks in this image.")] = None,
    container_runtime: Annotated[Literal["apptainer", "pyxis"], typer.Option(help="Container runtime.")] = "apptainer",
    mount: Annotated[list[Path] | None, typer.Option(help="Further folder that the container sees.")] = None,
) -> int:
    """Print a batch script: it saves before its time is over, is requeued, and resumes with the next sample."""
    shared = _chosen(job_files.JobFileArguments, locals())
    return slurm_command.launch_slurm(shared, _chosen(slurm_command.SlurmArguments, locals()))


@app.command(short_help="Print a JobSet for Kubernetes.")
def kubernetes(
    config: Config,
    accelerate: AccelerateFile,
    nodes: Nodes,
    gpus_per_node: Gpus,
    image: Annotated[str, typer.Option(help="Image of the ranks, with finetune in it.")],
    override: Overrides = None,
    output: Output = None,
    env: Environment = None,
    max_restarts: MaxRestarts = 3,
    stop: Stop = 180,
    cpu: Cpu = False,
    namespace: Annotated[Text, typer.Option(help="Namespace. Default: that of kubectl.")] = None,
    claim: Annotated[Texts, typer.Option(metavar="CLAIM:/PATH", help="Volume claim, and its mount path.")] = None,
    in_image: Annotated[list[Path] | None, typer.Option(metavar="FOLDER", help="Folder that is in the image.")] = None,
    secret: Annotated[
        Texts, typer.Option(metavar="NAME", help="Secret whose keys become variables, or VARIABLE=NAME:KEY for one.")
    ] = None,
    resource: Annotated[Texts, typer.Option(metavar="NAME=AMOUNT", help="Of each host: cpu=16, rdma/hca=1.")] = None,
    gpu_resource: Annotated[str, typer.Option(help="What the cluster calls a GPU.")] = "nvidia.com/gpu",
    node_selector: Annotated[Texts, typer.Option(metavar="LABEL=VALUE", help="Label of the hosts.")] = None,
    service_account: Annotated[Text, typer.Option(help="Service account of the pods, for object storage.")] = None,
) -> int:
    """Print a JobSet, with the job's files: started again as a whole when a pod is lost."""
    shared = _chosen(job_files.JobFileArguments, locals())
    return kubernetes_command.launch_kubernetes(shared, _chosen(kubernetes_command.KubernetesArguments, locals()))


@app.command(short_help="Run a job on a Ray cluster whose hosts come and go.")
def ray(
    config: Config,
    accelerate: AccelerateFile,
    nodes: Annotated[str, typer.Option(metavar="N or MIN:MAX", help="Number of hosts, or minimum and maximum.")],
    gpus_per_node: Gpus,
    override: Overrides = None,
    address: Annotated[Text, typer.Option(metavar="HOST", help="Head of the cluster. Default: this host.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Start Ray on this host, for this job alone.")] = False,
    cpu: Cpu = False,
    stop: Annotated[
        float, typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Time for ranks to save when stopped.")
    ] = 180.0,
    max_failures: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Give up after N failures or losses in a row without a new checkpoint."),
    ] = 10,
) -> int:
    """Run the job on a Ray cluster: when a host is lost the run continues without it, when one comes it takes part.

    The global batch, the order of the samples and the loss stay as they are on any number of hosts. Needs the extra
    `ray`.
    """
    return ray_command.launch_ray(_chosen(ray_command.RayArguments, locals()))


@app.command(name="next", short_help="Decide if a job is started again.")
def decide_next(
    run: Annotated[str, typer.Option(metavar="FOLDER", help="The run folder, or its URL.")],
    since: Annotated[float, typer.Option(metavar="SECONDS", help="When this attempt began: `date +%s.%N`.")],
    exit_code: Annotated[int, typer.Option(help="Exit code of the launcher.")],
    max_restarts: MaxRestarts = 3,
    local_folder: Annotated[Path | None, typer.Option(help="The job's run.local_folder.")] = None,
    machine_rank: Annotated[int, typer.Option(min=0, help="Number of this host; host 0 decides.")] = 0,
) -> int:
    """Decide whether a job whose launcher has ended is started again; job files call this.

    Exit code 0: the run is over. 75: start it again. 2: the user has to fix something. 1: it has failed too often.
    """
    return attempt_end.print_decision(
        run,
        since=since,
        code=exit_code,
        max_restarts=max_restarts,
        local_folder=local_folder,
        machine_rank=machine_rank,
    )


@with_ranks
def sweep(
    config: Config,
    override: Annotated[
        Texts,
        typer.Option(
            "--set",
            metavar="KEY=V1,V2,...",
            help="Values of a key; every combination is a run. Commas within brackets and quotes do not separate. "
            "With --search also a range: 1e-5..1e-3, log:1..100. Can be repeated.",
        ),
    ] = None,
    processes_per_run: Annotated[
        int | None,
        typer.Option(min=1, max=4096, metavar="N", help="Processes of each run. Default: 1, or as in the file."),
    ] = None,
    accelerate: OptionalAccelerateFile = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="SWEEP", help="Folder of the sweep. Default: run.folder with `-sweep`.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="K", help="Runs at once. Default: devices / processes; 1 without devices."
        ),
    ] = None,
    metric: Annotated[
        Text,
        typer.Option(metavar="NAME", help="Metric that ranks the runs, such as accuracy, or rouge:maximize."),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Search with N runs (TPE) instead of a grid."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start runs that failed again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run and print the commands.")] = False,
) -> int:
    """Train a job once for each combination of values, and compare the runs.

    The same command continues a sweep that was interrupted: finished runs are not repeated, others resume from their
    checkpoints, and further values add runs. Exit code 1 if a run has failed.
    """
    require("optuna", extra="sweep", purpose="`finetune sweep`")
    return sweep_command.sweep(_chosen(sweep_command.SweepRequest, locals()))


T = TypeVar("T")


def _chosen(record: type[T], given: Mapping[str, Any]) -> T:
    """Return the options that are fields of the record; missing ones have its defaults."""
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]
    values = {name: value for name, value in given.items() if name in names and value is not None}
    return record(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
