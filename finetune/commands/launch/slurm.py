"""`finetune launch slurm`: a batch script for a job."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from finetune.launch.jobs import JobRequest, ShellText, Word, command_line, launch_words, next_words, render

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
    sbatch: tuple[str, ...] = ()  # further directives: `--exclusive`
    setup: tuple[str, ...] = ()  # lines of the script, such as `module load cuda`
    env_file: Path | None = None  # a shell's variables, for secrets
    container: str | None = None
    container_runtime: str = APPTAINER  # or `pyxis`
    mount: tuple[Path, ...] = ()


def launch_slurm(arguments: JobFileArguments, slurm: SlurmArguments) -> int:
    """Print or write the script, and return the exit code. Raises UserError, and ConfigError for the job."""
    check_options((arguments, slurm), advice=_SECRETS)
    request, loaded = check_job(arguments)
    folder = Path.cwd() if request.is_at_url else Path(request.run_folder)
    files = [("--config", arguments.config), ("--accelerate", arguments.accelerate)]
    shared = [
        ("run.folder", str(folder)),
        ("run.local_folder", request.local_folder or ""),
        *((key, str(path.absolute())) for key, path in files),
        *((key, str(Path(path).absolute())) for key, path in read_paths(loaded.config)),
        ("the Python environment", sys.prefix if slurm.container is None else ""),
    ]
    for key, path in shared:
        require_shared_folder(path, num_nodes=arguments.nodes, key=key)
    if slurm.env_file is not None and not slurm.env_file.is_file():
        raise UserError(f"--env-file {slurm.env_file}: there is no such file. Write lines of NAME=VALUE to it.")
    if slurm.env_file is not None and slurm.env_file.stat().st_mode & 0o077:
        raise UserError(f"--env-file {slurm.env_file}: others can read it. Write: chmod 600 {slurm.env_file}")
    run = folder if request.is_at_url else folder.parent
    mounts = [Path.cwd(), arguments.config.parent, arguments.accelerate.parent, run, *slurm.mount]
    text = _script(request, slurm, log_folder=folder / LOGS_FOLDER, mounts=mounts)
    return deliver(text, arguments.output, advice=_SECRETS)


def _script(request: JobRequest, slurm: SlurmArguments, *, log_folder: Path, mounts: Sequence[Path]) -> str:
    """Return the script. Raises UserError for a value that a directive or a mount cannot contain."""
    requested = {
        "chdir": Path.cwd(),
        "cpus-per-task": slurm.cpus_per_node,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
    }
    options = [f"--{name}={value}" for name, value in requested.items() if value is not None]
    options += slurm.sbatch
    # A host whose ranks have ended must not end another that still saves or uploads: finetune itself ends failed runs.
    step = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    command = launch_words(request, machine_rank="SLURM_NODEID", log_folder=ShellText('"$LOGS/host-$SLURM_NODEID"'))
    host: list[Word] = ["bash", "-c", f'LOGS="$1"; exec {command_line(command)}', "host", ShellText('"$logs"')]
    image, alone = _container(slurm, mounts)
    has_own = sys.prefix != sys.base_prefix and slurm.container is None and not slurm.setup
    return render(
        "slurm.sh.jinja",
        request=request,
        options=map(_directive, options),
        log_folder=str(log_folder),
        setup=slurm.setup,
        activate=str(Path(sys.prefix) / "bin" / "activate") if has_own else None,  # where this command runs
        env_file=str(slurm.env_file.absolute()) if slurm.env_file is not None else None,
        cpus_per_task=slurm.cpus_per_node,
        srun=command_line([*step, *image, *host]),
        next=command_line([*alone, *image, *next_words(request, run_folder=ShellText('"$run"'), code="code")]),
    )


def _directive(option: str) -> str:
    """Return the option as sbatch reads it: in double quotes if it has blanks. Raises UserError."""
    name, mark, value = option.partition("=")
    if not name.startswith("--") or not option.isprintable() or any(character in option for character in '\\"'):
        raise UserError(f'{option!r}: write an option of sbatch, of printable characters without `\\` and `"`.')
    return f'{name}="{value}"' if mark and any(character in value for character in " '#") else option


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
