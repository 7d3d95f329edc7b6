"""The facts of all machines, ranks and a job: gathered, checked, and the communication that each strategy needs."""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter, ValidationError

from finetune.commands.doctor import gpus, network, ranks, software, system
from finetune.commands.doctor.findings import Finding, finding, gather_all
from finetune.commands.doctor.gpus import P2P_OFF, GpuFacts, pair_links
from finetune.commands.doctor.job_facts import JobFacts
from finetune.commands.doctor.network import NetworkFacts
from finetune.commands.doctor.ranks import LinkFacts, RankFacts
from finetune.commands.doctor.software import SoftwareFacts
from finetune.commands.doctor.system import StorageFacts, SystemFacts
from finetune.config.load import LoadedConfig
from finetune.data.token_cache.cache import DEFAULT_FOLDER, cache_folder
from finetune.errors import UserError
from finetune.runtime.files.read import first_problem, read_json


@dataclass(frozen=True)
class HostFacts:
    """One machine; missing facts are None or empty."""

    hostname: str
    system: SystemFacts = field(default_factory=SystemFacts)
    gpus: GpuFacts = field(default_factory=GpuFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    storage: StorageFacts = field(default_factory=StorageFacts)
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    variables: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # gatherers that failed, with the reason


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch; without a launch, this machine."""

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    link: LinkFacts | None = None
    job: JobFacts | None = None

    @property
    def world(self) -> int:
        """Return the number of ranks, 1 without a launch."""
        return max(1, len(self.ranks))


_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)


def read_facts(path: Path) -> Facts:
    """Return the facts that `doctor --json` printed; raises UserError for any other file."""
    try:
        content = read_json(path)
        return _FACTS.validate_python(content.get("facts", content) if isinstance(content, dict) else content)
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else f"it cannot be read ({error})"
        raise UserError(f"--facts {path}: {reason}. Give a file that `doctor --json` wrote.") from error


SECONDS = 30.0
"""Time limit of a gatherer: a driver that hangs never answers."""


def gather_host(loaded: LoadedConfig | None, variables: Mapping[str, str]) -> HostFacts:
    """Return the facts of this machine, with the disks of the folders to which a run of the job would write.

    `variables` is the initial environment of the process.
    """
    folders = {"cache": Path(DEFAULT_FOLDER).expanduser(), "run": Path.cwd()}
    if loaded is not None:
        folders = {"cache": cache_folder(loaded.config.data), "run": Path(loaded.config.run.folder)}
    parts, unread = gather_all(
        {
            "system": system.gather_system,
            "gpus": gpus.gather_gpus,
            "network": network.gather_network,
            "hub": partial(network.gather_hub, variables),
            "storage": partial(system.gather_storage, folders),
            "software": software.gather_software,
        },
        seconds=SECONDS,
    )
    hub = parts.pop("hub", None)
    facts = HostFacts(platform.node(), variables=software.gather_variables(variables), **parts)
    facts = replace(facts, network=replace(facts.network, hub=hub))
    if len(facts.gpus.gpus) > 1:
        topology, late = gather_all({"topology": gpus.read_topology}, seconds=SECONDS)
        facts = replace(facts, gpus=replace(facts.gpus, **topology))
        unread += late
    return replace(facts, unread=tuple(unread))


def check_facts(facts: Facts) -> list[Finding]:
    """Return the findings, the most severe first; a finding of several machines is listed once, with their names."""
    hosts_by_finding: dict[Finding, list[str]] = {}
    for host in facts.hosts:
        for each in _check_host(host, facts):
            hosts_by_finding.setdefault(each, []).append(host.hostname)
    hostnames = [host.hostname for host in facts.hosts]
    for each in (*ranks.check_ranks(facts.ranks), *check_pairs(facts), *check_speed(facts)):
        hosts_by_finding.setdefault(each, []).extend(hostnames)
    job = facts.job
    if job is not None and job.problem is not None:
        hosts_by_finding[finding("job", job=job)] = hostnames
    merged = [
        replace(each, hosts=() if len(set(names)) == len(hostnames) else tuple(dict.fromkeys(names)))
        for each, names in hosts_by_finding.items()
    ]
    return sorted(merged, key=lambda each: each.severity)


def _check_host(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    variables, job, is_wsl = host.variables, facts.job, host.system.is_wsl
    num_gpus = len(host.gpus.gpus)
    num_launched = sum(rank.hostname == host.hostname for rank in facts.ranks)
    has_other_hosts = variables.get("WORLD_SIZE", "1") != variables.get("LOCAL_WORLD_SIZE", "1")
    is_multi_host = has_other_hosts or len(facts.hosts) > 1
    is_hidden = variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    yield from software.check_drivers(host.gpus, host.software, is_hidden=is_hidden)
    yield from gpus.check_gpus(host.gpus, is_wsl=is_wsl, num_ranks=num_launched)
    has_infiniband = any(port.state == "ACTIVE" for port in host.network.infiniband)
    yield from gpus.check_links(host.gpus, host.system, variables, has_infiniband=has_infiniband)
    yield from network.check_interfaces(host.network, variables, is_multi_host=is_multi_host)
    yield from network.check_infiniband(
        host.network,
        variables,
        is_multi_host=is_multi_host,
        has_gpu=num_gpus > 0,
        locked_bytes=host.system.locked_memory_bytes,
    )
    if host.network.hub is not None:
        yield from network.check_hub(host.network.hub, () if job is None else job.names)
    yield from system.check_system(
        host.system,
        variables,
        num_gpus=num_gpus,
        num_ranks=max(1, num_launched or num_gpus),
        world=facts.world,
        num_parameters=0 if job is None else job.num_parameters,
    )
    yield from system.check_storage(host.storage, job, is_wsl=is_wsl, has_many_gpus=num_gpus > 1)
    yield from software.check_software(host.software, num_gpus=num_gpus)
    yield from software.check_variables(variables, host.gpus)


EFFICIENCY = 0.5
"""Share of the speed of a large matrix product that a training step reaches."""

HIDDEN_SHARE = 0.3
"""Share of the computing time up to which communication mostly overlaps with the backward pass."""

NOMINAL = JobFacts("a model of 1 billion parameters", num_parameters=10**9, num_trained=10**9, item_bytes=2)
"""The assumed model, without a job."""


@dataclass(frozen=True)
class StrategyCost:
    """The communication of a strategy in a step."""

    name: str
    num_bytes: float  # sent by each rank
    seconds: float
    share: float | None  # of the computing time; None if that is unknown

    @property
    def verdict(self) -> str:
        """Return in a few words whether the strategy suits the link."""
        if self.share is None:
            return ""
        if self.share <= HIDDEN_SHARE:
            return "suits this link"
        return "slowed by this link" if self.share <= 1 else "bound by this link"


def bus_bandwidth(link: LinkFacts, *, world: int) -> float:
    """Return the bytes per second that each rank sends in the largest all-reduce, which sends 2 (n-1)/n of its size."""
    largest = link.all_reduce[-1]
    return 2 * (world - 1) / world * largest.num_bytes / largest.seconds


def compute_seconds(facts: Facts) -> float | None:
    """Return the time that a rank computes in a step: 6 operations per parameter and token, 4 with adapters."""
    job, speeds = facts.job, [rank.flops_per_second for rank in facts.ranks if rank.flops_per_second > 0]
    if job is None or not job.num_parameters or not job.tokens_per_step or not speeds:
        return None
    operations = 4 * job.num_parameters + 2 * job.num_trained
    return operations * job.tokens_per_step / facts.world / (EFFICIENCY * min(speeds))


def strategy_costs(facts: Facts) -> Sequence[StrategyCost]:
    """Return the costs of DDP, ZeRO-1/2 and FSDP/ZeRO-3 in a step of the job, or of a model of 1 billion parameters."""
    if facts.link is None or facts.world < 2:
        return ()
    job = facts.job if facts.job is not None and facts.job.num_parameters else NOMINAL
    computed, speed = compute_seconds(facts), bus_bandwidth(facts.link, world=facts.world)
    part = (facts.world - 1) / facts.world
    gradients = job.num_trained * job.gradient_bytes
    trained, weights = job.num_trained * job.item_bytes, job.num_parameters * job.item_bytes
    num_microbatches = max(1, job.global_batch_size // (job.microbatch_size * facts.world))
    sent = {
        "ddp": 2 * part * gradients,
        "zero1, zero2": 2 * part * gradients + part * trained,
        "fsdp2, zero3": part * (2 * num_microbatches * weights + gradients),
    }
    return [
        StrategyCost(name, size, size / speed, None if computed is None else size / speed / computed)
        for name, size in sent.items()
    ]


SLOW_PAIR = 0.5
"""Share of the median speed of pairs within a machine, or across machines."""

_NVLINK_BYTES_PER_SECOND = 20e9
"""A lower speed means that NVLink is not used: PCIe 4 reaches this one, and NVLink is several times faster."""


def check_pairs(facts: Facts) -> Iterator[Finding]:
    """Yield the pairs of ranks whose connection is slower than that of others."""
    if facts.link is None:
        return
    by_number = {rank.rank: rank for rank in facts.ranks}
    topology = {host.hostname: pair_links(host.gpus.topology) for host in facts.hosts}
    has_links = facts.link.backend == "nccl"  # processes of one CPU have no link
    for is_within in (True, False) if has_links else (False,):
        pairs = [
            pair
            for pair in facts.link.pairs
            if (by_number[pair.first].hostname == by_number[pair.second].hostname) == is_within
        ]
        typical = median(pair.bytes_per_second for pair in pairs) if pairs else 0.0
        for pair in pairs:
            if pair.bytes_per_second >= SLOW_PAIR * typical:
                continue
            one, other = by_number[pair.first], by_number[pair.second]
            link = topology.get(one.hostname, {}).get(f"{one.local_rank}-{other.local_rank}", "") if is_within else ""
            fix = "check cable, port (`ethtool`, `ibstat`) and switch of these machines"
            if is_within:
                is_pcie = link in ("SYS", "PHB", "NODE")
                fix = f"{P2P_OFF}, and measure again" if is_pcie else "check the load of that machine"
            yield finding(
                "slow-pair",
                one=one,
                other=other,
                pair=pair,
                over=f" over {link}" if link else "",
                typical=typical,
                fix=fix,
            )


def check_speed(facts: Facts) -> Iterator[Finding]:
    """Yield whether NVLink is unused, and the strategies that suit the link between the ranks of a launch."""
    if facts.link is None or facts.world < 2:
        return
    speed = bus_bandwidth(facts.link, world=facts.world)
    links = [link for host in facts.hosts for link in pair_links(host.gpus.topology).values()]
    is_nvlinked = bool(links) and len(facts.hosts) == 1 and all(link.startswith("NV") for link in links)
    if is_nvlinked and facts.link.backend == "nccl" and speed < _NVLINK_BYTES_PER_SECOND:
        yield finding("nvlink-unused", speed=speed)
    computed, costs = compute_seconds(facts), strategy_costs(facts)
    job = facts.job
    if computed is None or job is None or not costs:
        return
    fit = [cost for cost in costs if (cost.share or 0.0) <= HIDDEN_SHARE]
    ddp, sharded = costs[0], costs[-1]
    if fit:
        names = ", ".join(cost.name for cost in fit)
        yield finding("strategy", names=names, computed=computed, ddp=ddp, sharded=sharded)
        return
    microbatches = facts.world * job.microbatch_size
    batch_size = job.global_batch_size * (ddp.share or 0.0) / HIDDEN_SHARE
    batch_size = math.ceil(batch_size / microbatches) * microbatches
    yield finding("link-bound", ddp=ddp, sharded=sharded, computed=computed, batch_size=batch_size)
