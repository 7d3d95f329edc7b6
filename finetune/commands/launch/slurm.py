"""`finetune launch slurm`: a batch script for a job, or an array of the runs of a sweep."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.job_files import (
    INSIST,
    Destination,
    JobFileArguments,
    check_job,
    check_options,
    deliver,
    require_shared_folder,
)
from finetune.commands.sweep.axes import FORBIDDEN, grid_points, parse_axes
from finetune.commands.sweep.runs import check_runs, is_within, name_runs, own_overrides
from finetune.config.load import LoadedConfig
from finetune.config.overrides import override_label
from finetune.config.paths import is_url
from finetune.config.rules.files import read_paths
from finetune.errors import UserError
from finetune.launch.jobs import (
    JobRequest,
    ShellText,
    Word,
    command_line,
    exports,
    launch_words,
    next_words,
    quoted,
    rank_words,
    render_script,
)

APPTAINER = "apptainer"


LOGS_FOLDER = "logs"

_SECRETS = (
    "Export it in the shell that calls `sbatch`, which passes its environment on (`--export`), or write "
    "`NAME=VALUE` to a file of mode 0600 and name that: --env-file FILE."
)


@dataclass(frozen=True)
class SlurmArguments:
    """The options of Slurm; None: the default of the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    cpus_per_node: int | None = None
    gpu_type: str | None = None
    sbatch: tuple[str, ...] = ()  # further directives: `--exclusive`
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


@dataclass(frozen=True)
class Container:
    """The image in which ranks run, and the folders of the host that are mounted at the same paths."""

    image: str
    runtime: str  # APPTAINER or `pyxis`
    folders: tuple[str, ...]


@dataclass(frozen=True)
class ArrayTask:
    """One run of a sweep: the words that its task adds to the job's, and its folders."""

    arguments: tuple[str, ...]
    run_folder: str
    log_folder: str


def slurm_script(
    request: JobRequest, slurm: SlurmArguments, tasks: Sequence[ArrayTask], *, container: Container | None
) -> str:
    """Return the script. Raises UserError for a value that a directive cannot contain."""
    cpus = slurm.cpus_per_node
    if cpus is not None and slurm.ranks == "srun":
        cpus = max(1, cpus // request.ranks_per_node)
    lines = [f"module load {quoted(module)}" for module in slurm.module]
    if slurm.activate is not None:
        activate = quoted(str(slurm.activate))
        lines += ["# shellcheck disable=SC1090,SC1091 # a file of the cluster", f". {activate} || exit 2"]
    if slurm.env_file is not None:
        variables = quoted(str(slurm.env_file.absolute()))
        lines += ["set -a", "# shellcheck disable=SC1090,SC1091", f". {variables} || exit 2", "set +a"]
    # A host whose ranks have ended must not end another that still saves or uploads: finetune itself ends failed runs.
    step: list[Word] = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    overrides: list[Word] = [ShellText('"${overrides[@]}"')] if tasks else []
    if slurm.ranks == "srun" or request.is_single:
        step += [ShellText('--output="${logs//%/%%}/rank-%t.log"')]
        ranks = [*rank_words(request), *overrides]
    else:
        command = launch_words(request, machine_rank="SLURM_NODEID", log_folder=ShellText('"$LOGS/host-$SLURM_NODEID"'))
        script = f'LOGS="$1"; shift; exec {command_line(command)} "$@"'
        ranks = ["bash", "-c", script, "host", ShellText('"$logs"'), *overrides]
    return render_script(
        "slurm.sh.jinja",
        directives=_directives(request, slurm, num_tasks=len(tasks), cpus=cpus),
        tasks=tasks,
        is_in_folder=bool(tasks) or not request.is_at_url,
        run_folder=request.run_folder,
        log_folder=str(slurm.log_folder),
        setup=([*lines, ""] if lines else []),
        exports=exports(request.variables()),
        cpus_per_task=cpus,
        srun=command_line([*step, *_in_container(container, ranks, is_step=True)]),
        next=command_line(
            _in_container(container, next_words(request, run_folder=ShellText('"$run"'), code="code"), is_step=False)
        ),
    )


def _directives(request: JobRequest, slurm: SlurmArguments, *, num_tasks: int, cpus: int | None) -> list[str]:
    """Return the options as sbatch reads them: in double quotes if they have blanks. Raises UserError."""
    gpus = f"{slurm.gpu_type}:{request.ranks_per_node}" if slurm.gpu_type else str(request.ranks_per_node)
    at_once = f"%{slurm.at_once}" if slurm.at_once else ""
    log = "%A_%a" if num_tasks else "%j"
    requested = {
        "--job-name": request.name,
        "--nodes": str(request.num_nodes),
        "--ntasks-per-node": str(request.ranks_per_node if slurm.ranks == "srun" else 1),
        "--gpus-per-node": gpus if request.uses_gpus else None,
        "--cpus-per-task": str(cpus) if cpus is not None else None,
        "--time": slurm.time,
        "--partition": slurm.partition,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--constraint": slurm.constraint,
        "--array": f"0-{num_tasks - 1}{at_once}" if num_tasks else None,
        "--chdir": str(Path.cwd()),
        "--output": f"{request.name}-{log}.out",  # in --chdir: Slurm makes no folders
        "--signal": f"TERM@{request.stop_seconds}",
    }
    pairs: list[tuple[str, str | None]] = [(name, value) for name, value in requested.items() if value is not None]
    pairs += [("--open-mode", "append"), ("--requeue", None)]
    for text in slurm.sbatch:
        name, mark, value = text.partition("=")
        if not name.startswith("--") or name in dict(pairs):
            raise UserError(f"--sbatch {text}: write an option of sbatch that is not set yet, such as `--exclusive`.")
        pairs.append((name, value if mark else None))
    directives = []
    for name, option in pairs:
        text = name if option is None else f"{name}={option}"
        if not text.isprintable() or any(character in text for character in '\\"'):
            raise UserError(
                f'{name}: a directive of Slurm cannot contain {option!r}. Use printable characters, no `\\` or `"`.'
            )
        is_quoted = option is not None and any(character in option for character in " '#")
        directives.append(f'{name}="{option}"' if is_quoted else text)
    return directives


def _in_container(container: Container | None, command: Sequence[Word], *, is_step: bool) -> list[Word]:
    """Return the words so that they run in the image; a step's follow `srun` and its options."""
    if container is None:
        return list(command)
    folders = ",".join(f"{folder}:{folder}" for folder in container.folders)
    if container.runtime == APPTAINER:
        return ["apptainer", "exec", "--nv", "--bind", folders, container.image, *command]
    image = [f"--container-image={container.image}", f"--container-mounts={folders}"]
    if is_step:
        return [*image, *command]
    return ["srun", "--nodes=1", "--ntasks=1", "--overlap", *image, *command]


def launch_slurm(arguments: JobFileArguments, slurm: SlurmArguments, destination: Destination) -> int:
    """Print, write or submit the script, and return the exit code. Raises UserError, and ConfigError for the job."""
    destination = replace(destination, suffix=".sbatch", command=("sbatch",), advice=f"{_SECRETS} {INSIST}")
    check_options((arguments, slurm), advice=destination.advice, allows_secrets=destination.allow_secrets)
    request, loaded = check_job(arguments)
    tasks = _array_tasks(arguments, slurm, loaded) if slurm.sweep else []
    if not slurm.sweep and (slurm.sweep_folder is not None or slurm.at_once is not None):
        raise UserError(
            "--sweep-folder, --at-once: only an array uses them. Write --sweep KEY=V1,V2 or leave them out."
        )
    run_folders = [task.run_folder for task in tasks] or [request.run_folder]
    for folder in run_folders:
        require_shared_folder(folder, num_nodes=arguments.nodes)
    parent = Path.cwd() if is_url(request.run_folder) else Path(request.run_folder)
    log_folder = parent / LOGS_FOLDER if slurm.log_folder is None else slurm.log_folder.absolute()
    require_shared_folder(str(log_folder), num_nodes=arguments.nodes, key="--log-folder")
    if request.local_folder is not None:
        require_shared_folder(request.local_folder, num_nodes=arguments.nodes, key="run.local_folder")
    inputs: list[tuple[str, str | Path]] = [
        ("--config", arguments.config),
        ("--accelerate", arguments.accelerate),
        *read_paths(loaded.config),
    ]
    if slurm.container is None:
        inputs.append(("the Python environment", sys.prefix))
    for key, path in inputs:
        require_shared_folder(str(Path(path).absolute()), num_nodes=arguments.nodes, key=key)
    written = [Path(folder).parent for folder in run_folders if not is_url(folder)]
    container = _container(
        slurm, request, folders=[*written, log_folder] if slurm.log_folder or not written else written
    )
    if slurm.env_file is not None and not slurm.env_file.is_file():
        raise UserError(f"--env-file {slurm.env_file}: there is no such file. Write lines of NAME=VALUE to it.")
    if slurm.env_file is not None and slurm.env_file.stat().st_mode & 0o077:
        raise UserError(f"--env-file {slurm.env_file}: others can read it. Write: chmod 600 {slurm.env_file}")
    activate = slurm.activate
    if activate is None and sys.prefix != sys.base_prefix and slurm.container is None and not slurm.module:
        activate = Path(sys.prefix)  # the environment in which this command runs
    if activate is not None:
        script = activate / "bin" / "activate" if activate.is_dir() else activate
        if not script.is_file():
            raise UserError(f"--activate {activate}: there is no {script}. Name the folder of a virtual environment.")
        activate = script.absolute()
    slurm = replace(slurm, activate=activate, log_folder=log_folder)
    text = slurm_script(request, slurm, tasks, container=container)
    return deliver(text, destination, name=request.name)


def _array_tasks(arguments: JobFileArguments, slurm: SlurmArguments, loaded: LoadedConfig) -> list[ArrayTask]:
    """Return the runs that `finetune sweep` would start with these values, in the same order and folders."""
    if slurm.sweep_folder is None and is_url(loaded.config.run.folder):
        raise UserError("--sweep-folder: run.folder is a URL, and the runs of a sweep are in folders. Name one.")
    for text in arguments.override:
        if (key := text.partition("=")[0]) in FORBIDDEN:
            raise UserError(f"{override_label(text)}: {FORBIDDEN[key].replace('--folder', '--sweep-folder')}")
    axes = parse_axes(slurm.sweep)
    for text in arguments.override:
        if is_within(text.partition("=")[0], frozenset(axis.key for axis in axes)):
            raise UserError(f"{override_label(text)}: --sweep also has values of this key. Remove one of the two.")
    swept = [axis.key for axis in axes if axis.is_swept]
    folder = (slurm.sweep_folder or Path(f"{loaded.config.run.folder}-sweep")).absolute()
    runs = name_runs(grid_points(axes), axes, swept=swept, folder=folder, names={})
    whole = [replace(run, overrides=(*arguments.override, *run.overrides)) for run in runs]
    configs = check_runs(arguments.config, whole, num_processes=arguments.world)
    logs = slurm.log_folder.absolute() if slurm.log_folder is not None else None
    tasks = []
    for run in runs:
        overrides = (*run.overrides, *own_overrides(run, configs[run.name]))
        words = tuple(word for override in overrides for word in ("--set", override))
        log_folder = logs / run.name if logs else run.folder / LOGS_FOLDER
        tasks.append(ArrayTask(words, str(run.folder), str(log_folder)))
    return tasks


def _container(slurm: SlurmArguments, request: JobRequest, *, folders: Sequence[Path]) -> Container | None:
    """Return the container, with the folders of the job and of --mount at the same paths. Raises UserError."""
    if slurm.container is None:
        if slurm.mount or slurm.container_runtime != APPTAINER:
            raise UserError("--mount, --container-runtime: they need --container IMAGE. Write it, or leave them out.")
        return None
    config = Path(request.job.arguments[request.job.arguments.index("--config") + 1])
    own = (Path.cwd(), config.parent, request.job.accelerate_file.parent, *folders, *slurm.mount)
    mounted = tuple(dict.fromkeys(str(folder.absolute()) for folder in own))
    for folder in mounted:
        if not folder.isprintable() or "," in folder or ":" in folder:
            raise UserError(f"--container: {folder!r} cannot be mounted: it has `,`, `:` or a control character.")
    return Container(slurm.container, slurm.container_runtime, mounted)
