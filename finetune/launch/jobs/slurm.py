"""The batch script of a Slurm job: one launcher per host, or srun's own ranks; requeued as the run's end says."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import UserError
from finetune.launch.jobs.request import JobRequest, Rendezvous, launch_words, next_words, rank_words
from finetune.launch.jobs.shell import ShellText, Word, command_line, exports, quoted, render

APPTAINER, PYXIS = "apptainer", "pyxis"


@dataclass(frozen=True)
class Container:
    """The image in which ranks run, and the folders of the host that they see at the same place."""

    image: str
    runtime: str  # APPTAINER or PYXIS
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Directives:
    """What Slurm is asked for; None: left to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    cpus_per_node: int | None = None
    gpu_type: str | None = None
    sbatch: tuple[str, ...] = ()  # further directives: `--exclusive`


@dataclass(frozen=True)
class SlurmOptions:
    """How the script starts the ranks, and where."""

    working_folder: str
    log_folder: str
    directives: Directives = Directives()
    modules: tuple[str, ...] = ()
    activate: str | None = None  # the activate script of a virtual environment
    env_file: str | None = None  # NAME=VALUE, exported to the ranks
    container: Container | None = None
    uses_srun_ranks: bool = False
    runs_at_once: int | None = None


@dataclass(frozen=True)
class ArrayTask:
    """One run of a sweep: what its task adds to the job's words, and where it writes."""

    words: tuple[str, ...]
    run_folder: str
    log_folder: str


def slurm_script(request: JobRequest, options: SlurmOptions, tasks: Sequence[ArrayTask] = ()) -> str:
    """Return the script. Raises UserError where a directive cannot hold what was asked for."""
    container = options.container
    cpus = options.directives.cpus_per_node
    if cpus is not None and options.uses_srun_ranks:
        cpus = max(1, cpus // request.ranks_per_node)
    return render(
        "slurm.sh.jinja",
        directives=list(map(_directive, _directives(request, options, num_tasks=len(tasks), cpus=cpus))),
        tasks=tasks,
        is_in_folder=bool(tasks) or not request.is_at_url,
        run_folder=request.run_folder,
        log_folder=options.log_folder,
        setup=_setup(options),
        exports=exports(request.variables()),
        cpus_per_task=cpus,
        srun=command_line(_srun(request, options, has_tasks=bool(tasks))),
        next=command_line(
            _in_container(container, next_words(request, run_folder=ShellText('"$run"'), code="code"), is_step=False)
        ),
    )


def _directives(
    request: JobRequest, options: SlurmOptions, *, num_tasks: int, cpus: int | None
) -> list[tuple[str, str | None]]:
    asked = options.directives
    gpus = f"{asked.gpu_type}:{request.ranks_per_node}" if asked.gpu_type else str(request.ranks_per_node)
    at_once = f"%{options.runs_at_once}" if options.runs_at_once else ""
    log = "%A_%a" if num_tasks else "%j"
    requested = {
        "--job-name": request.name,
        "--nodes": str(request.num_nodes),
        "--ntasks-per-node": str(request.ranks_per_node if options.uses_srun_ranks else 1),
        "--gpus-per-node": gpus if request.uses_gpus else None,
        "--cpus-per-task": str(cpus) if cpus is not None else None,
        "--time": asked.time,
        "--partition": asked.partition,
        "--account": asked.account,
        "--qos": asked.qos,
        "--constraint": asked.constraint,
        "--array": f"0-{num_tasks - 1}{at_once}" if num_tasks else None,
        "--chdir": options.working_folder,
        "--output": f"{request.name}-{log}.out",  # in --chdir: Slurm makes no folders
        "--signal": f"TERM@{request.stop_seconds}",
    }
    pairs: list[tuple[str, str | None]] = [(name, value) for name, value in requested.items() if value is not None]
    pairs += [("--open-mode", "append"), ("--requeue", None)]
    for text in asked.sbatch:
        name, mark, value = text.partition("=")
        if not name.startswith("--") or name in dict(pairs):
            raise UserError(f"--sbatch {text}: write an option of sbatch that is not set yet, such as `--exclusive`.")
        pairs.append((name, value if mark else None))
    return pairs


def _directive(pair: tuple[str, str | None]) -> str:
    """Return the option as sbatch reads it: in double quotes where it has blanks. Raises UserError."""
    name, value = pair
    text = name if value is None else f"{name}={value}"
    if not text.isprintable() or any(character in text for character in '\\"'):
        raise UserError(
            f'{name}: a directive of Slurm cannot hold {value!r}. Use printable characters, no `\\` or `"`.'
        )
    return f'{name}="{value}"' if value and any(character in value for character in " '#") else text


def _setup(options: SlurmOptions) -> list[str]:
    lines = [f"module load {quoted(module)}" for module in options.modules]
    if options.activate is not None:
        lines += [
            "# shellcheck disable=SC1090,SC1091 # a file of the cluster",
            f". {quoted(options.activate)} || exit 2",
        ]
    if options.env_file is not None:
        lines += ["set -a", "# shellcheck disable=SC1090,SC1091", f". {quoted(options.env_file)} || exit 2", "set +a"]
    return [*lines, ""] if lines else []


def _srun(request: JobRequest, options: SlurmOptions, *, has_tasks: bool) -> list[Word]:
    overrides: list[Word] = [ShellText('"${overrides[@]}"')] if has_tasks else []
    # A host whose ranks have ended must not end another that still saves or uploads: what fails, finetune itself ends.
    step: list[Word] = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    if options.uses_srun_ranks or request.is_single:
        step += [ShellText('--output="${logs//%/%%}/rank-%t.log"')]
        ranks = [*rank_words(request), *overrides]
        return [*step, *_in_container(options.container, ranks, is_step=True)]
    meeting = Rendezvous("SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT")
    log_folder = ShellText('"$LOGS/host-$SLURM_NODEID"')
    command = launch_words(request, meeting, log_folder=log_folder)
    script = f'LOGS="$1"; shift; exec {command_line(command)} "$@"'
    host: list[Word] = ["bash", "-c", script, "host", ShellText('"$logs"'), *overrides]
    return [*step, *_in_container(options.container, host, is_step=True)]


def _in_container(container: Container | None, words: Sequence[Word], *, is_step: bool) -> list[Word]:
    """Return the words so that they run in the image; those of a step follow `srun` and its options."""
    if container is None:
        return list(words)
    folders = ",".join(f"{folder}:{folder}" for folder in container.folders)
    if container.runtime == APPTAINER:
        return ["apptainer", "exec", "--nv", "--bind", folders, container.image, *words]
    image = [f"--container-image={container.image}", f"--container-mounts={folders}"]
    if is_step:
        return [*image, *words]
    return ["srun", "--nodes=1", "--ntasks=1", "--overlap", *image, *words]
