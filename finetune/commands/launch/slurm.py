"""`finetune launch slurm`: a batch script for a job."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.job_files import (
    JobFileArguments,
    check_job,
    check_options,
    deliver,
    require_shared_folder,
)
from finetune.config.rules.files import read_paths
from finetune.errors import UserError
from finetune.launch.jobs import (
    JobRequest,
    ShellText,
    Word,
    command_line,
    launch_words,
    next_words,
    rank_words,
    render,
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
    time: str | None = None
    cpus_per_node: int | None = None
    gpu_type: str | None = None
    sbatch: tuple[str, ...] = ()  # further directives: `--exclusive`
    setup: tuple[str, ...] = ()  # lines of the script, such as `module load cuda`
    env_file: Path | None = None  # a shell's variables, for secrets
    container: str | None = None
    container_runtime: str = APPTAINER  # or `pyxis`
    mount: tuple[Path, ...] = ()
    ranks: str = "accelerate"
    log_folder: Path | None = None


def launch_slurm(arguments: JobFileArguments, slurm: SlurmArguments) -> int:
    """Print, write or submit the script, and return the exit code. Raises UserError, and ConfigError for the job."""
    check_options((arguments, slurm), advice=_SECRETS)
    request, loaded = check_job(arguments)
    parent = Path.cwd() if request.is_at_url else Path(request.run_folder)
    log_folder = parent / LOGS_FOLDER if slurm.log_folder is None else slurm.log_folder.absolute()
    inputs = [("--config", arguments.config), ("--accelerate", arguments.accelerate), *read_paths(loaded.config)]
    shared = [
        ("run.folder", request.run_folder),
        ("run.local_folder", request.local_folder or ""),
        ("--log-folder", str(log_folder)),
        *((key, str(Path(path).absolute())) for key, path in inputs),
        ("the Python environment", sys.prefix if slurm.container is None else ""),
    ]
    for key, path in shared:
        require_shared_folder(path, num_nodes=arguments.nodes, key=key)
    if slurm.env_file is not None and not slurm.env_file.is_file():
        raise UserError(f"--env-file {slurm.env_file}: there is no such file. Write lines of NAME=VALUE to it.")
    if slurm.env_file is not None and slurm.env_file.stat().st_mode & 0o077:
        raise UserError(f"--env-file {slurm.env_file}: others can read it. Write: chmod 600 {slurm.env_file}")
    logs = [log_folder] if slurm.log_folder or request.is_at_url else []
    written = [] if request.is_at_url else [Path(request.run_folder).parent]
    folders = [Path.cwd(), arguments.config.parent, arguments.accelerate.parent, *written, *logs, *slurm.mount]
    text = _script(request, replace(slurm, log_folder=log_folder), folders=folders)
    return deliver(text, arguments, file=f"{request.name}.sbatch", command=("sbatch",), advice=_SECRETS)


def _script(request: JobRequest, slurm: SlurmArguments, *, folders: Sequence[Path]) -> str:
    """Return the script. Raises UserError for a value that a directive or a mount cannot contain."""
    cpus = slurm.cpus_per_node
    if cpus is not None and slurm.ranks == "srun":
        cpus = max(1, cpus // request.ranks_per_node)
    # A host whose ranks have ended must not end another that still saves or uploads: finetune itself ends failed runs.
    step: list[Word] = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    if slurm.ranks == "srun" or request.is_single:
        step.append(ShellText('--output="${logs//%/%%}/rank-%t.log"'))
        ranks = rank_words(request)
    else:
        command = launch_words(request, machine_rank="SLURM_NODEID", log_folder=ShellText('"$LOGS/host-$SLURM_NODEID"'))
        script = f'LOGS="$1"; shift; exec {command_line(command)} "$@"'
        ranks = ["bash", "-c", script, "host", ShellText('"$logs"')]
    image, alone = _container(slurm, folders)
    has_own = sys.prefix != sys.base_prefix and slurm.container is None and not slurm.setup
    return render(
        "slurm.sh.jinja",
        directives=_directives(request, slurm, cpus=cpus),
        is_in_folder=not request.is_at_url,
        run_folder=request.run_folder,
        log_folder=str(slurm.log_folder),
        setup=slurm.setup,
        activate=str(Path(sys.prefix) / "bin" / "activate") if has_own else None,  # where this command runs
        env_file=str(slurm.env_file.absolute()) if slurm.env_file is not None else None,
        variables=request.variables(),
        cpus_per_task=cpus,
        srun=command_line([*step, *image, *ranks]),
        next=command_line([*alone, *image, *next_words(request, run_folder=ShellText('"$run"'), code="code")]),
    )


def _directives(request: JobRequest, slurm: SlurmArguments, *, cpus: int | None) -> list[str]:
    """Return the options as sbatch reads them: in double quotes if they have blanks. Raises UserError."""
    gpus = f"{slurm.gpu_type}:{request.ranks_per_node}" if slurm.gpu_type else str(request.ranks_per_node)
    requested = {
        "--job-name": request.name,
        "--nodes": str(request.num_nodes),
        "--ntasks-per-node": str(request.ranks_per_node if slurm.ranks == "srun" else 1),
        "--gpus-per-node": gpus if request.uses_gpus else None,
        "--cpus-per-task": str(cpus) if cpus is not None else None,
        "--time": slurm.time,
        "--partition": slurm.partition,
        "--account": slurm.account,
        "--chdir": str(Path.cwd()),
        "--output": f"{request.name}-%j.out",  # in --chdir: Slurm makes no folders
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


def _container(slurm: SlurmArguments, folders: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the words before a command that runs in the image, and those before them outside of a step of `srun`.

    The folders are mounted at the same paths. Raises UserError for one that cannot be.
    """
    if slurm.container is None:
        if slurm.mount or slurm.container_runtime != APPTAINER:
            raise UserError("--mount, --container-runtime: they need --container IMAGE. Write it, or leave them out.")
        return [], []
    paths = tuple(dict.fromkeys(str(folder.absolute()) for folder in folders))
    for path in paths:
        if not path.isprintable() or "," in path or ":" in path:
            raise UserError(f"--container: {path!r} cannot be mounted: it has `,`, `:` or a control character.")
    mounts = ",".join(f"{path}:{path}" for path in paths)
    if slurm.container_runtime == APPTAINER:
        return ["apptainer", "exec", "--nv", "--bind", mounts, slurm.container], []
    image = [f"--container-image={slurm.container}", f"--container-mounts={mounts}"]
    return image, ["srun", "--nodes=1", "--ntasks=1", "--overlap"]
