"""`finetune launch torchrun`: the commands of all hosts, or a supervisor with which hosts may come and go."""

import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.supervisor.agent import Job, launch_command
from finetune.launch.supervisor.members import Attempt, Limits
from finetune.launch.supervisor.network import own_address
from finetune.launch.supervisor.supervise import Timing, supervise
from finetune.strategy.unsupported import require_supported_file

SUPERVISORS_FOLDER = "supervisors"
"""Where supervisors meet, in the run folder."""


@dataclass(frozen=True)
class Here:
    """What a supervisor is told of its own host; None: found out."""

    name: str | None = None
    interface: str | None = None
    shared_folder: Path | None = None


def read_limits(nodes: str) -> Limits:
    """Return how many hosts take part: `2`, or `1:4`. Raises UserError.

    >>> read_limits("1:4")
    Limits(least=1, most=4, max_failures=3)
    """
    found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", nodes)
    if found is None:
        raise UserError(f"--nodes {nodes}: write a number of hosts, `2`, or the least and the most, `1:4`.")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise UserError(f"--nodes {nodes}: write at least 1, and the smaller number first.")
    return Limits(least, most)


def make_job(
    config: Path, overrides: Sequence[str], *, accelerate_file: Path, ranks_per_host: int, stop_seconds: float
) -> tuple[Job, LoadedConfig]:
    """Return what each host launches. Raises UserError where the job or the accelerate file is not right."""
    loaded = load_config(config, overrides)
    words = ["-m", "finetune", "--config", str(config.absolute())]
    for override in overrides:
        words += ["--set", override]
    file = accelerate_file.absolute()
    return Job(tuple(words), file, ranks_per_host, is_hybrid=_is_hybrid(file), stop_seconds=stop_seconds), loaded


def print_commands(job: Job, loaded: LoadedConfig, limits: Limits) -> None:
    """Print the command of each host."""
    require_divisible_batch(loaded, num_processes=limits.most * job.ranks_per_host)
    hosts = tuple(f"HOST{number}" for number in range(limits.most))
    attempt = Attempt(1, hosts, ("HOST0_ADDRESS", *hosts[1:]), 29500, "")
    for rank, host in enumerate(hosts):
        words = launch_command(job, attempt, rank=rank)
        print(f"# on {host}\n{shlex.join(['accelerate', 'launch', *words[3:]])}")


def supervise_job(job: Job, loaded: LoadedConfig, limits: Limits, *, here: Here, timing: Timing) -> int:
    """Run the job on this host with whichever others are there, and return the exit code."""
    for count in range(limits.least, limits.most + 1):
        require_divisible_batch(loaded, num_processes=count * job.ranks_per_host)
    run_folder = loaded.config.run.folder
    if here.shared_folder is None and is_url(str(run_folder)):
        raise UserError("--shared-folder: the run folder is not on a file system; name a folder that all hosts share.")
    shared = here.shared_folder or Path(run_folder) / SUPERVISORS_FOLDER
    return supervise(
        job,
        limits,
        name=_host_name(here.name),
        address=own_address(here.interface),
        run_folder=Path(run_folder),
        shared_folder=shared.absolute(),
        timing=timing,
        log=lambda line: print(line, flush=True),
    )


def _host_name(name: str | None) -> str:
    """Return the name of this host as a part of a file's name. Raises UserError for one that is given and is none."""
    if name is not None and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise UserError(f"--name {name}: write letters, digits, `.`, `_` and `-` only.")
    return name or re.sub(r"[^\w.-]", "-", platform.node())[:100] or "host"


def _is_hybrid(file: Path) -> bool:
    """Tell whether the accelerate file has a copy of the model per host (HSDP). Raises UserError."""
    try:
        values = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        parallelism = (values or {}).get("parallelism_config") or {}
        require_supported_file(file, values or {})
        return int(parallelism.get("parallelism_config_dp_replicate_size", 1)) > 1
    except FileNotFoundError:
        raise UserError(f"--accelerate: there is no file {file}.") from None
    except (OSError, UnicodeDecodeError, YAMLError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"--accelerate {file}: not an accelerate file: {error}") from None
