"""Shared by all launchers: checks the job and its texts, and prints or writes its job file.

Secrets, which other users could read in a job file, are refused in it, and so are invisible characters.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from finetune.commands.rehearse.accelerate_file import AccelerateFile, for_world, read_accelerate_file
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.paths import is_url
from finetune.errors import StrategyError, UserError
from finetune.launch.jobs import JobRequest, LaunchJob
from finetune.runtime.files import atomic
from finetune.runtime.text.redact import is_secret_variable, redact_foreign, redacted_command
from finetune.runtime.text.terminal import escape_controls, write_file_to_stdout

_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")
"""Folders that are local to each host."""

_MAX_NAME = 31
"""Characters of a name: the pods of a JobSet add theirs, and a host name has 63."""


@dataclass(frozen=True)
class JobFileArguments:
    """The options that all schedulers share, with their names on the command line."""

    config: Path
    accelerate: Path
    nodes: int
    gpus_per_node: int
    override: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # NAME=VALUE
    max_restarts: int = 3
    stop: int = 180
    cpu: bool = False
    output: Path | None = None  # where the job file is written; None: it is printed
    elsewhere: tuple[Path, ...] = ()  # folders that exist only on the hosts


def check_job(arguments: JobFileArguments) -> tuple[JobRequest, LoadedConfig]:
    """Return the checked job; raises UserError for an invalid job, accelerate file or number of hosts."""
    file = read_accelerate_file(arguments.accelerate)
    job, loaded = make_job(
        arguments.config,
        arguments.override,
        accelerate_file=arguments.accelerate,
        ranks_per_host=arguments.gpus_per_node,
        elsewhere=arguments.elsewhere,
    )
    world = arguments.nodes * arguments.gpus_per_node
    require_shared_batch(loaded, file, world=world, num_nodes=arguments.nodes)
    run = loaded.config.run
    # A name that is valid for Slurm and Kubernetes, from that of the run folder.
    name = re.sub(r"[^a-z0-9]+", "-", Path(run.folder).name.lower()).strip("-")[:_MAX_NAME].strip("-")
    name = name if name[:1].isalpha() else f"finetune-{name}".strip("-")
    request = JobRequest(
        name=name,
        job=replace(job, is_hybrid=job.is_hybrid and arguments.nodes > 1),
        num_nodes=arguments.nodes,
        run_folder=run.folder,
        local_folder=run.local_folder if is_url(run.folder) else None,
        is_single=file.distributed_type == "NO",
        max_restarts=arguments.max_restarts,
        stop_seconds=arguments.stop,
        uses_gpus=not arguments.cpu,
        environment=read_pairs(arguments.env, option="--env", noun="variable", name=r"[A-Za-z_][A-Za-z0-9_]*"),
    )
    return request, loaded


def make_job(
    config: Path,
    overrides: Sequence[str],
    *,
    accelerate_file: Path,
    ranks_per_host: int,
    elsewhere: Sequence[Path] = (),
) -> tuple[LaunchJob, LoadedConfig]:
    """Return what each host launches. Raises UserError for an invalid job or accelerate file.

    Files in the folders `elsewhere` are on the hosts, and are not checked here.
    """
    loaded = load_config(config, overrides, elsewhere=elsewhere)
    words = ["-m", "finetune", "--config", str(config.absolute())]
    for override in overrides:
        words += ["--set", override]
    file = read_accelerate_file(accelerate_file)
    if file.num_copies > 1 and ranks_per_host % file.sequence_size:
        raise StrategyError(
            f"--accelerate {file.path}: parallelism_config_sp_size: {file.sequence_size} does not divide the "
            f"{ranks_per_host} ranks of a host, which has its own copy of the model. Write a divisor."
        )
    job = LaunchJob(
        tuple(words),
        accelerate_file.absolute(),
        ranks_per_host,
        is_hybrid=file.num_copies > 1,
        sequence_size=file.sequence_size * file.tensor_size,
        is_deepspeed=file.distributed_type == "DEEPSPEED",
    )
    return job, loaded


def require_shared_batch(loaded: LoadedConfig, file: AccelerateFile, *, world: int, num_nodes: int = 1) -> None:
    """Raise ConfigError or StrategyError unless this number of ranks can share the global batch as the file says."""
    if world > 1 and file.distributed_type == "MULTI_CPU":
        raise StrategyError(
            f"--accelerate {file.path}: with MULTI_CPU, accelerate starts one process per host, and the job needs "
            f"{world} in total. Use accelerate_configs/ddp.yaml or another file with `use_cpu: false`."
        )
    resized = for_world(file, world, num_nodes=num_nodes)
    require_divisible_batch(loaded, num_processes=resized.data_parallel_size)


def require_shared_folder(folder: str, *, num_nodes: int, key: str = "run.folder") -> None:
    """Raise UserError for a folder that is local to each host."""
    local = next((parent for parent in _LOCAL_FOLDERS if Path(folder).is_relative_to(parent)), None)
    if num_nodes > 1 and not is_url(folder) and local is not None:
        raise UserError(
            f"{key}: {folder} is in {local}, which is local to each host. Name a folder that all {num_nodes} hosts "
            "share, or a URL (`s3://`, `gs://`, `az://`)."
        )


_IMAGE_USER = re.compile(r"(?:[a-z]+:(?://)?)?[^/@\s]+:[^/@\s]+@(?!sha256:)")
_READ_BY_OTHERS = "this is a secret, and everyone who can read the job file could read it"
_NAMES_OF_SECRETS = ("secret", "env_file")
"""Options that name secrets without their values."""


def check_options(records: Iterable[Any], *, advice: str) -> None:
    """Raise UserError for an option with a secret or an invisible character; `advice` says how to pass secrets."""
    typed = [(field.name, getattr(record, field.name)) for record in records for field in fields(record)]
    texts = [(name, text) for name, value in typed for text in (value if isinstance(value, tuple) else (value,))]
    for name, text in ((name, str(text)) for name, text in texts if isinstance(text, str | Path)):
        option = "--set" if name == "override" else f"--{name.replace('_', '-')}"
        if escape_controls(text) != text:
            raise UserError(
                f"{option} {escape_controls(text)}: it has a control character or an invisible one, shown here as its "
                "escape, which a job file cannot contain. Remove it."
            )
        variable, _, value = text.partition("=")
        user = _IMAGE_USER.match(text) if name in ("image", "container") else None
        if name in _NAMES_OF_SECRETS:
            shown = text
        elif name == "env" and is_secret_variable(variable, value):
            shown = f"{variable}=[redacted]"
        else:
            shown = f"[redacted]@{text[user.end() :]}" if user is not None else redacted_command([text])[0]
        if shown != text:
            raise UserError(f"{option} {shown}: {_READ_BY_OTHERS}. {advice}")


def check_text(text: str, *, source: str, advice: str, redact: Callable[[str], str] = redact_foreign) -> None:
    """Raise UserError where a text of a job file, named `source`, has a secret or an invisible character."""
    visible = escape_controls(text)
    lines = zip(text.split("\n"), visible.split("\n"), redact(visible).split("\n"), strict=False)  # a key has several
    for number, (line, seen, shown) in enumerate(lines, start=1):
        if seen != line:
            raise UserError(f"{source}, line {number}: it has a control character or an invisible one: {shown.strip()}")
        if shown != line:
            raise UserError(f"{source}, line {number}: {_READ_BY_OTHERS}: {shown.strip()}. {advice}")


def read_pairs(texts: Sequence[str], *, option: str, noun: str, name: str) -> dict[str, str]:
    """Return the pairs of `NAME=VALUE`; raises UserError for an invalid name, or one that is written twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        left, mark, value = text.partition("=")
        if not mark or not re.fullmatch(name, left) or "\0" in value:
            raise UserError(f"{option} {text}: write NAME=VALUE, with the name of a {noun}.")
        if left in pairs:
            raise UserError(f"{option} {left}: it is written twice.")
        pairs[left] = value
    return pairs


def deliver(text: str, output: Path | None, *, advice: str) -> int:
    """Print or write the job file, and return the exit code. Raises UserError for a secret in it."""
    check_text(text, source="the job file", advice=advice)
    if output is None:
        write_file_to_stdout(text)
    else:
        atomic.write_bytes(output.absolute(), text.encode())
        print(f"written: {output}", file=sys.stderr)
    return 0
