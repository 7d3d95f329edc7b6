"""`finetune launch slurm`: a batch script for a job, or an array of the runs of a sweep."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.contents import INSIST, check_options
from finetune.commands.launch.job_files import Destination, JobFileArguments, check_job, deliver, require_shared_folder
from finetune.commands.sweep.axes import FORBIDDEN, parse_axes
from finetune.commands.sweep.launch import own_overrides
from finetune.commands.sweep.runs import SweepRun, check_runs, grid_points, is_within, name_runs
from finetune.config.load import LoadedConfig
from finetune.config.overrides import override_label
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.jobs.request import JobRequest
from finetune.launch.jobs.slurm import APPTAINER, ArrayTask, Container, Directives, SlurmOptions, slurm_script

LOGS_FOLDER = "logs"

_SECRETS = (
    "Export it in the shell that calls `sbatch`, which passes its environment on (`--export`), or write "
    "`NAME=VALUE` to a file of mode 0600 and name that: --env-file FILE."
)


@dataclass(frozen=True)
class SlurmArguments(Directives):
    """The options that are Slurm's alone."""

    module: tuple[str, ...] = ()
    activate: Path | None = None
    env_file: Path | None = None  # a shell's variables, for secrets
    container: str | None = None
    container_runtime: str = APPTAINER
    mount: tuple[Path, ...] = ()
    ranks: str = "accelerate"
    log_folder: Path | None = None
    sweep: tuple[str, ...] = ()
    sweep_folder: Path | None = None
    at_once: int | None = None


def launch_slurm(words: JobFileArguments, slurm: SlurmArguments, destination: Destination) -> int:
    """Print, write or submit the script, and return the exit code. Raises UserError, and ConfigError for the job."""
    destination = replace(destination, suffix=".sbatch", command=("sbatch",), advice=f"{_SECRETS} {INSIST}")
    check_options((words, slurm), advice=destination.advice, allows_secrets=destination.allow_secrets)
    request, loaded = check_job(words)
    tasks = _array_tasks(words, slurm, loaded) if slurm.sweep else []
    if not slurm.sweep and (slurm.sweep_folder is not None or slurm.at_once is not None):
        raise UserError("--sweep-folder, --at-once: they are for an array. Write --sweep KEY=V1,V2 or leave them out.")
    run_folders = [task.run_folder for task in tasks] or [request.run_folder]
    for folder in run_folders:
        require_shared_folder(folder, num_nodes=words.nodes)
    log_folder = _log_folder(slurm, request.run_folder)
    require_shared_folder(str(log_folder), num_nodes=words.nodes, key="--log-folder")
    if request.local_folder is not None:
        require_shared_folder(request.local_folder, num_nodes=words.nodes, key="run.local_folder")
    written = [Path(folder).parent for folder in run_folders if not is_url(folder)]
    container = _container(
        slurm, request, folders=[*written, log_folder] if slurm.log_folder or not written else written
    )
    options = SlurmOptions(
        working_folder=str(Path.cwd()),
        log_folder=str(log_folder),
        directives=slurm,
        modules=slurm.module,
        activate=_activate(slurm),
        env_file=_env_file(slurm),
        container=container,
        uses_srun_ranks=slurm.ranks == "srun",
        runs_at_once=slurm.at_once,
    )
    text = slurm_script(request, options, tasks)
    return deliver(text, destination, name=request.name)


def _array_tasks(words: JobFileArguments, slurm: SlurmArguments, loaded: LoadedConfig) -> list[ArrayTask]:
    """Return the runs that `finetune sweep` would make of these values, in its order and in its folders."""
    if slurm.sweep_folder is None and is_url(loaded.config.run.folder):
        raise UserError("--sweep-folder: run.folder is a URL, and the runs of a sweep are in folders. Name one.")
    for text in words.override:
        if (key := text.partition("=")[0]) in FORBIDDEN:
            raise UserError(f"{override_label(text)}: {FORBIDDEN[key].replace('--folder', '--sweep-folder')}")
    axes = parse_axes(slurm.sweep)
    for text in words.override:
        if is_within(text.partition("=")[0], frozenset(axis.key for axis in axes)):
            raise UserError(f"{override_label(text)}: --sweep has values of this key, too. Remove one of the two.")
    swept = [axis.key for axis in axes if axis.is_swept]
    folder = (slurm.sweep_folder or Path(f"{loaded.config.run.folder}-sweep")).absolute()
    runs = name_runs(grid_points(axes), axes, swept=swept, folder=folder, names={})
    whole = [replace(run, overrides=(*words.override, *run.overrides)) for run in runs]
    configs = check_runs(words.config, whole, num_processes=words.world)
    logs = slurm.log_folder.absolute() if slurm.log_folder is not None else None
    return [_task(run, configs[run.name], logs=logs) for run in runs]


def _task(run: SweepRun, loaded: LoadedConfig, *, logs: Path | None) -> ArrayTask:
    words: list[str] = []
    for override in (*run.overrides, *own_overrides(run, loaded)):
        words += ["--set", override]
    return ArrayTask(tuple(words), str(run.folder), str(logs / run.name if logs else run.folder / LOGS_FOLDER))


def _log_folder(slurm: SlurmArguments, run_folder: str) -> Path:
    if slurm.log_folder is not None:
        return slurm.log_folder.absolute()
    return Path.cwd() / LOGS_FOLDER if is_url(run_folder) else Path(run_folder) / LOGS_FOLDER


def _activate(slurm: SlurmArguments) -> str | None:
    """Return the activate script: the one named, or that of the environment in which this command runs."""
    named = slurm.activate
    if named is None:
        is_own = sys.prefix != sys.base_prefix and slurm.container is None and not slurm.module
        named = Path(sys.prefix) if is_own else None
    if named is None:
        return None
    script = named / "bin" / "activate" if named.is_dir() else named
    if not script.is_file():
        raise UserError(f"--activate {named}: there is no {script}. Name the folder of a virtual environment.")
    return str(script.absolute())


def _env_file(slurm: SlurmArguments) -> str | None:
    """Return the file of variables that the script reads. Raises UserError for one that others can read."""
    if slurm.env_file is None:
        return None
    if not slurm.env_file.is_file():
        raise UserError(f"--env-file {slurm.env_file}: there is no such file. Write lines of NAME=VALUE to it.")
    if slurm.env_file.stat().st_mode & 0o077:
        raise UserError(f"--env-file {slurm.env_file}: others can read it. Write: chmod 600 {slurm.env_file}")
    return str(slurm.env_file.absolute())


def _container(slurm: SlurmArguments, request: JobRequest, *, folders: Sequence[Path]) -> Container | None:
    """Return the container, which sees the folders of the job and those given at the same places. Raises UserError."""
    if slurm.container is None:
        if slurm.mount or slurm.container_runtime != APPTAINER:
            raise UserError("--mount, --container-runtime: they need --container IMAGE. Write it, or leave them out.")
        return None
    config = Path(request.job.words[request.job.words.index("--config") + 1])
    own = (Path.cwd(), config.parent, request.job.accelerate_file.parent, *folders, *slurm.mount)
    mounted = tuple(dict.fromkeys(str(folder.absolute()) for folder in own))
    for folder in mounted:
        if not folder.isprintable() or "," in folder or ":" in folder:
            raise UserError(f"--container: {folder!r} cannot be mounted: it has `,`, `:` or a control character.")
    return Container(slurm.container, slurm.container_runtime, mounted)
