"""`finetune launch torchrun`: the commands of all hosts, or a supervisor that lets hosts join and leave."""

import platform
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.commands.launch.contents import check_text
from finetune.commands.rehearse.accelerate_file import AccelerateFile, read_accelerate_file
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.paths import is_url
from finetune.errors import StrategyError, UserError
from finetune.launch.supervisor.agent import Job, launch_command
from finetune.launch.supervisor.members import Attempt, Limits
from finetune.launch.supervisor.network import own_address
from finetune.launch.supervisor.supervise import HostSettings, RunAccess, Timing, supervise
from finetune.runtime.supervision.attempt import mark_attempt
from finetune.runtime.supervision.spot import SpotNotice
from finetune.runtime.supervision.writer_lock import is_locked
from finetune.runtime.text.terminal import write_file_to_stdout
from finetune.strategy.unsupported import TENSOR

_SECRETS = "Export it as a variable on each host, or start the hosts with --supervise, which prints no command."

SUPERVISORS_FOLDER = "supervisors"
"""Folder of the supervisors' files, in the run folder."""


@dataclass(frozen=True)
class LocalHost:
    """Name, interface and shared folder of this host; None: detected."""

    name: str | None = None
    interface: str | None = None
    shared_folder: Path | None = None


def read_limits(nodes: str) -> Limits:
    """Return the limits on the number of hosts, from `2` or `1:4`. Raises UserError.

    >>> read_limits("1:4")
    Limits(least=1, most=4, max_failures=3)
    """
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", nodes)
    if match is None:
        raise UserError(f"--nodes {nodes}: write a number of hosts, `2`, or the least and the most, `1:4`.")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UserError(f"--nodes {nodes}: write at least 1, and the smaller number first.")
    return Limits(least, most)


def make_job(
    config: Path,
    overrides: Sequence[str],
    *,
    accelerate_file: Path,
    ranks_per_host: int,
    stop_seconds: float,
    elsewhere: Sequence[Path] = (),
) -> tuple[Job, LoadedConfig]:
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
    job = Job(
        tuple(words),
        accelerate_file.absolute(),
        ranks_per_host,
        is_hybrid=file.num_copies > 1,
        sequence_size=file.sequence_size * file.tensor_size,
        is_deepspeed=file.distributed_type == "DEEPSPEED",
        stop_seconds=stop_seconds,
    )
    return job, loaded


def require_shared_batch(loaded: LoadedConfig, file: AccelerateFile, *, world: int) -> None:
    """Raise ConfigError or StrategyError unless this number of ranks can share the global batch and the rows of one."""
    size = file.sequence_size
    if size < 1 or world % size:
        raise StrategyError(
            f"--accelerate {file.path}: parallelism_config_sp_size: {size} does not divide the {world} ranks. Write a "
            "divisor, preferably of the number of ranks per host."
        )
    if not file.may_split_layers_over(world):
        raise StrategyError(
            f"--accelerate {file.path}: "
            + TENSOR.sentence(f"parallelism_config_tp_size: {file.tensor_size} on {world} ranks")
        )
    require_divisible_batch(loaded, num_processes=world // size // file.tensor_size)


def print_commands(job: Job, loaded: LoadedConfig, limits: Limits) -> None:
    """Print the command of each host. Raises UserError where it would hold a secret or an invisible character."""
    file = read_accelerate_file(job.accelerate_file)
    require_shared_batch(loaded, file, world=limits.most * job.ranks_per_host)
    hosts = tuple(f"HOST{number}" for number in range(limits.most))
    attempt = Attempt(1, hosts, ("HOST0_ADDRESS", *hosts[1:]), 29500, "")
    text = ""
    for rank, host in enumerate(hosts):
        words = launch_command(job, attempt, rank=rank)
        text += f"# on {host}\n{shlex.join(['accelerate', 'launch', *words[3:]])}\n"
    check_text(text, source="the command", advice=_SECRETS, allows_secrets=False)
    write_file_to_stdout(text)


def supervise_job(job: Job, loaded: LoadedConfig, limits: Limits, *, local_host: LocalHost, timing: Timing) -> int:
    """Run the job on this host together with all available others, and return the exit code."""
    file = read_accelerate_file(job.accelerate_file)
    for count in range(limits.least, limits.most + 1):
        require_shared_batch(loaded, file, world=count * job.ranks_per_host)
    run_folder = loaded.config.run.folder
    if local_host.shared_folder is None and is_url(str(run_folder)):
        raise UserError("--shared-folder: the run folder is a URL; name a folder that all hosts share.")
    shared = local_host.shared_folder or Path(run_folder) / SUPERVISORS_FOLDER
    address, interface = own_address(local_host.interface)
    host = HostSettings(_host_name(local_host.name), address, interface, Path(run_folder), shared.absolute())
    access = RunAccess(
        is_locked=partial(is_locked, host.run_folder),
        mark_attempt=partial(mark_attempt, host.shared_folder),
        is_reclaimed=_spot_notice(loaded),
    )
    return supervise(job, limits, host=host, access=access, timing=timing, log=_log)


def _spot_notice(loaded: LoadedConfig) -> Callable[[], bool]:
    cloud = loaded.config.run.spot_notice
    return (lambda: False) if cloud is None else SpotNotice(cloud, log=_log).start()


def _log(line: str) -> None:
    print(line, flush=True)


def _host_name(name: str | None) -> str:
    """Return the name of this host as a part of a file's name. Raises UserError for an invalid --name."""
    if name is not None and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise UserError(f"--name {name}: write letters, digits, `.`, `_` and `-` only.")
    return name or re.sub(r"[^\w.-]", "-", platform.node())[:100] or "host"
