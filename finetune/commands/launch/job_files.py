"""Shared by all schedulers: checks the job, and prints, writes or submits its job file."""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from finetune.commands.launch.contents import check_text
from finetune.commands.launch.torchrun import make_job, require_shared_batch
from finetune.commands.rehearse.accelerate_file import AccelerateFile, read_accelerate_file
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.config.rules.files import read_paths
from finetune.errors import StrategyError, UserError
from finetune.launch.jobs import JobRequest
from finetune.runtime.files import atomic
from finetune.runtime.optional import lazily
from finetune.runtime.text.terminal import write_file_to_stdout

with lazily():  # torch, only for --doctor FILE
    from finetune.commands.doctor import checks as doctor_checks
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
    require_shared_batch(loaded, file, world=arguments.world)
    check_processes(file, num_nodes=arguments.nodes, world=arguments.world)
    variables = {}
    if arguments.doctor is not None:
        variables = network_variables(doctor_checks.read_facts(arguments.doctor), num_nodes=arguments.nodes)
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
        environment={**variables, **parse_environment(arguments.env)},
    )
    return request, loaded


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


def parse_environment(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables of `NAME=VALUE`; raises UserError."""
    return read_pairs(texts, option="--env", noun="variable", name=r"[A-Za-z_][A-Za-z0-9_]*")


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


def check_processes(file: AccelerateFile, *, num_nodes: int, world: int) -> None:
    """Raise StrategyError where the accelerate file is not for this number of processes."""
    if world > 1 and (file.distributed_type in ("NO", "MULTI_CPU") or file.values.get("use_cpu") is True):
        raise StrategyError(
            f"--accelerate {file.path}: with it, accelerate starts one process per host, and the job needs {world} in "
            "total. Use accelerate_configs/ddp.yaml or another file with `use_cpu: false`."
        )
    sizes = file.values.get("parallelism_config") or {}
    numbers = {name.removeprefix("parallelism_config_"): size for name, size in sizes.items() if name.endswith("_size")}
    counts = {name: size for name, size in numbers.items() if isinstance(size, int) and size > 1}
    product = math.prod(counts.values())
    is_resized = num_nodes > 1 and counts.keys() - {"sp_size"} == {"dp_replicate_size", "dp_shard_size"}
    if counts and not is_resized and (world % product or ("dp_shard_size" in counts and world != product)):
        listed = " x ".join(f"{name} {size}" for name, size in counts.items())
        raise StrategyError(
            f"--accelerate {file.path}: parallelism_config has {listed} = {product}, and the job has {world} processes."
        )


_ELASTIC_FABRIC = ("efa", "rdmap")
"""Prefixes of AWS's Elastic Fabric Adapters, which the kernel lists as InfiniBand and NCCL cannot use as such."""

_WITHOUT_P2P = ("no-p2p", "p2p-iommu")
"""Findings after which NCCL must not copy between GPUs directly: it would hang, or sums would be wrong."""

T = TypeVar("T")


def network_variables(facts: "doctor_checks.Facts", *, num_nodes: int) -> dict[str, str]:
    """Return the variables that the ranks of such hosts need; empty where the defaults of NCCL and gloo are right."""
    variables: dict[str, str] = {}
    if num_nodes > 1:
        variables |= _interfaces(facts) | _adapters(facts)
    if any(finding.key in _WITHOUT_P2P for finding in doctor_checks.check_facts(facts)):
        variables["NCCL_P2P_DISABLE"] = "1"
    return variables


def _interfaces(facts: "doctor_checks.Facts") -> dict[str, str]:
    """Return the interface of the default route, if it has the same name on all hosts."""
    name = _same_everywhere(facts, lambda host: host.network.default_interface)
    if name is None:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}


def _adapters(facts: "doctor_checks.Facts") -> dict[str, str]:
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


def _same_everywhere(facts: "doctor_checks.Facts", of: "Callable[[doctor_checks.HostFacts], T | None]") -> T | None:
    values = {of(host) for host in facts.hosts}
    return values.pop() if len(values) == 1 else None
