"""Shared by all launchers: checks the job and its texts, and prints, writes or submits its job file.

Secrets, which other users could read in a job file, are refused in it, and so are invisible characters.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from finetune.commands.rehearse.accelerate_file import AccelerateFile, for_world, read_accelerate_file
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.paths import is_url
from finetune.config.rules.files import read_paths
from finetune.errors import StrategyError, UserError
from finetune.launch.jobs import JobRequest, LaunchJob
from finetune.runtime.files import atomic
from finetune.runtime.optional import lazily
from finetune.runtime.text.redact import is_secret_variable, redact_foreign, redacted_command
from finetune.runtime.text.terminal import escape_controls, write_file_to_stdout

with lazily():  # torch, only for --doctor FILE
    from finetune.commands.doctor import checks as doctor_checks
    from finetune.commands.doctor import facts as doctor_facts
    from finetune.commands.doctor import network as doctor_network

_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")
"""Folders that are local to each host."""

_MAX_NAME = 40
"""Characters of a name: the pods of a JobSet add theirs, and a host name has 63."""


@dataclass(frozen=True)
class JobFileArguments:
    """The options that all schedulers share, with their names on the command line."""

    config: Path
    accelerate: Path
    nodes: int
    gpus_per_node: int
    override: tuple[str, ...] = ()
    name: str | None = None
    doctor: Path | None = None  # facts of `finetune doctor --json`
    env: tuple[str, ...] = ()  # NAME=VALUE
    max_restarts: int = 3
    stop: int = 180
    cpu: bool = False
    elsewhere: tuple[Path, ...] = ()  # folders that exist only on the hosts

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.gpus_per_node


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
    require_shared_batch(loaded, file, world=arguments.world, num_nodes=arguments.nodes)
    variables = {}
    if arguments.doctor is not None:
        variables = network_variables(doctor_facts.read_facts(arguments.doctor), num_nodes=arguments.nodes)
    run, name = loaded.config.run, arguments.name
    if name is not None and not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME - 2}}}[a-z0-9])?", name):
        raise UserError(
            f"--name {name}: write lowercase letters, digits and `-`, starting with a letter, at most {_MAX_NAME} "
            "characters."
        )
    if name is None:  # one that is valid for Slurm, Kubernetes and SkyPilot
        name = re.sub(r"[^a-z0-9]+", "-", Path(run.folder).name.lower()).strip("-")[: _MAX_NAME - 9].strip("-")
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
        environment={
            **variables,
            **read_pairs(arguments.env, option="--env", noun="variable", name=r"[A-Za-z_][A-Za-z0-9_]*"),
        },
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


def require_kept(request: JobRequest, mounted: Sequence[Path], *, advice: str) -> None:
    """Raise UserError where the run is written to a folder that is lost with its host, or is local to each host.

    On one host a run at a URL may be written anywhere first: it is uploaded from there.
    """
    if request.is_at_url and request.num_nodes == 1:
        return
    key, folder = (
        ("run.local_folder", request.local_folder) if request.is_at_url else ("run.folder", request.run_folder)
    )
    if folder is not None and any(Path(folder).is_relative_to(path) for path in mounted):
        return
    problem = "is not set" if folder is None else f"{folder} exists only on the host, and is lost with it"
    url = "" if request.num_nodes > 1 else ", or write a URL: --set run.folder=s3://BUCKET/NAME"
    raise UserError(f"{key}: {problem}. {advice}{url}.")


def require_files(loaded: LoadedConfig, folders: Sequence[Path], *, advice: str) -> None:
    """Raise UserError for a file that the job reads and that is in none of these folders, which the hosts have."""
    for key, path in read_paths(loaded.config):
        if not any(Path(path).is_relative_to(folder) for folder in folders):
            raise UserError(f"{key}: {path} is only on this machine, not on the hosts. {advice}.")


_IMAGE_USER = re.compile(r"(?:[a-z]+:(?://)?)?[^/@\s]+:[^/@\s]+@(?!sha256:)")
_READ_BY_OTHERS = "this is a secret, and everyone who can read the job file could read it"
INSIST = "Or pass --allow-secrets and --output FILE: only you can read that file (mode 0600)."
_NAMES_OF_SECRETS = ("secret", "env_file")
"""Options that name secrets without their values."""


def check_options(records: Iterable[Any], *, advice: str, allows_secrets: bool) -> None:
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
        if allows_secrets or name in _NAMES_OF_SECRETS:
            continue
        variable, _, value = text.partition("=")
        user = _IMAGE_USER.match(text) if name in ("image", "container") else None
        if name == "env" and is_secret_variable(variable, value):
            shown = f"{variable}=[redacted]"
        else:
            shown = f"[redacted]@{text[user.end() :]}" if user is not None else redacted_command([text])[0]
        if shown != text:
            raise UserError(f"{option} {shown}: {_READ_BY_OTHERS}. {advice}")


def check_text(
    text: str, *, source: str, advice: str, allows_secrets: bool, redact: Callable[[str], str] = redact_foreign
) -> None:
    """Raise UserError where a text of a job file, named `source`, has a secret or an invisible character."""
    visible = escape_controls(text)
    cleaned = visible if allows_secrets else redact(visible)
    lines = zip(text.split("\n"), visible.split("\n"), cleaned.split("\n"), strict=False)  # a key has several lines
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


@dataclass(frozen=True)
class Destination:
    """The destination of the job file: printed, written, or submitted."""

    output: Path | None = None
    submit: bool = False
    suffix: str = ".yaml"
    command: tuple[str, ...] = ()  # that submits the file: sbatch
    allow_secrets: bool = False
    advice: str = ""  # how to pass secrets to the ranks instead


def deliver(text: str, destination: Destination, *, name: str) -> int:
    """Print or write the job file, or submit it, and return the exit code. Raises UserError."""
    check_text(text, source="the job file", advice=destination.advice, allows_secrets=destination.allow_secrets)
    if destination.allow_secrets and destination.output is None and not destination.submit:
        raise UserError("--allow-secrets: others may read the terminal's output. Write the file with --output FILE.")
    if destination.submit and shutil.which(destination.command[0]) is None:
        raise UserError(
            f"--submit: `{destination.command[0]}` is not on the PATH of this machine. Write the file with --output "
            f"and submit it from a machine that has it: {' '.join(destination.command)} FILE"
        )
    file = destination.output
    if destination.submit and file is None:
        file = Path(f"{name}{destination.suffix}")
    if file is None:
        write_file_to_stdout(text)
        return 0
    atomic.write_bytes(file.absolute(), text.encode(), is_private=destination.allow_secrets)
    print(f"written: {file}", file=sys.stderr)
    if not destination.submit:
        return 0
    return subprocess.run([*destination.command, str(file.absolute())], check=False).returncode


_ELASTIC_FABRIC = ("efa", "rdmap")
"""Prefixes of AWS's Elastic Fabric Adapters, which the kernel lists as InfiniBand and NCCL cannot use as such."""

_WITHOUT_P2P = ("no-p2p", "p2p-iommu")
"""Findings after which NCCL must not copy between GPUs directly: it would hang, or sums would be wrong."""

T = TypeVar("T")


def network_variables(facts: "doctor_facts.Facts", *, num_nodes: int) -> dict[str, str]:
    """Return the variables that the ranks of such hosts need; empty where the defaults of NCCL and gloo are right."""
    variables: dict[str, str] = {}
    if num_nodes > 1:
        name = _same_everywhere(facts, lambda host: host.network.default_interface)
        if name is not None:
            variables |= {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}
        variables |= _adapters(facts)
    if any(finding.key in _WITHOUT_P2P for finding in doctor_checks.check_facts(facts)):
        variables["NCCL_P2P_DISABLE"] = "1"
    return variables


def _adapters(facts: "doctor_facts.Facts") -> dict[str, str]:
    """Return the setting that limits NCCL to usable InfiniBand ports; by default it uses all of them."""
    if any(port.device.startswith(_ELASTIC_FABRIC) for host in facts.hosts for port in host.network.infiniband):
        return {"FI_PROVIDER": "efa"}
    if not any(host.network.infiniband for host in facts.hosts):
        return {}
    if not all(_usable(host.network.infiniband) for host in facts.hosts):
        return {"NCCL_IB_DISABLE": "1"}  # a host has none: all of them use TCP
    chosen = _same_everywhere(facts, lambda host: _usable(host.network.infiniband))
    has_others = any(len(_usable(host.network.infiniband)) < len(host.network.infiniband) for host in facts.hosts)
    return {"NCCL_IB_HCA": f"={','.join(chosen)}"} if chosen is not None and has_others else {}


def _usable(ports: "Iterable[doctor_network.InfinibandPort]") -> tuple[str, ...]:
    """Return the ports with a link; where some are of InfiniBand, only those: others are for storage or ssh."""
    active = [port for port in ports if port.state == "ACTIVE"]
    fast = [port for port in active if port.link_layer == "InfiniBand"] or active
    return tuple(f"{port.device}:{port.port}" for port in fast)


def _same_everywhere(facts: "doctor_facts.Facts", of: "Callable[[doctor_facts.HostFacts], T | None]") -> T | None:
    values = {of(host) for host in facts.hosts}
    return values.pop() if len(values) == 1 else None
