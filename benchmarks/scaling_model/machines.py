"""Machines that the curves are drawn for: of the package's table, or as `finetune doctor --json` measured them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from finetune.commands.doctor.checks import Facts, bus_bandwidth
from finetune.commands.doctor.ranks import LinkFacts, PairSpeed
from finetune.commands.plan.assumptions import TRAINING_SHARE
from finetune.commands.plan.hardware import Hardware, parse_hardware
from finetune.commands.plan.step_time import Cluster, Device
from finetune.errors import UserError
from finetune.runtime.gpus import GpuModel, find_gpu


@dataclass(frozen=True)
class Machine:
    """One of many equal machines: what one of its ranks computes and sends. `cluster` is of a single machine."""

    name: str
    device: Device
    cluster: Cluster
    memory_bytes: int
    peak_flops: float  # in bfloat16, as its maker names it

    def of(self, num_ranks: int) -> Cluster:
        """Return so many ranks on such machines."""
        return replace(self.cluster, num_ranks=num_ranks)


def listed(gpu: str, *, per_node: int = 8, network_gbit: float | None = None, name: str | None = None) -> Machine:
    """Return a machine with GPUs of the table; `network_gbit` is of the whole machine. Raises UserError."""
    hardware = parse_hardware(f"{per_node}x{gpu}", num_nodes=1, network_gbit=network_gbit)
    network = hardware.gpu.network_bandwidth * per_node * 8 / 1e9
    return _from_table(hardware, name or f"{per_node}x {hardware.gpu.name}, {network:,.0f} Gbit/s per machine")


def usual() -> tuple[Machine, ...]:
    """Return the machines that docs/proof/scaling.md is drawn for."""
    return (
        listed("H100-80GB", network_gbit=3200, name="8x H100, InfiniBand 8 x 400 Gbit/s"),
        listed("A100-80GB", network_gbit=1600, name="8x A100-80GB, InfiniBand 8 x 200 Gbit/s"),
        listed("H100-80GB", network_gbit=100, name="8x H100, Ethernet 100 Gbit/s"),
    )


def measured(facts: Facts, *, gpu: str | None = None, network_gbit: float | None = None) -> Machine:
    """Return the machine of `doctor --json`: its matrix product, all-reduce and latencies replace those of the table.

    Memory bandwidth and, with one machine alone, the network are the table's. Raises UserError where the facts have no
    link, or where neither they nor `--gpu` name a GPU of the table.
    """
    if facts.link is None or facts.world < 2:
        raise UserError("--facts: no link was measured. Write `accelerate launch ... -m finetune doctor --json`.")
    kind = _kind(facts, gpu)
    per_node = max(1, facts.world // max(1, len(facts.hosts)))
    base = _from_table(parse_hardware(f"{per_node}x{kind.name}", num_nodes=1, network_gbit=network_gbit), "")
    flops = min(rank.flops_per_second for rank in facts.ranks)
    device = base.device if flops <= 0 else replace(base.device, flops=flops * TRAINING_SHARE)
    cluster = _measured_cluster(base.cluster, facts, facts.link)
    several = f"{len(facts.hosts)} x " if len(facts.hosts) > 1 else ""
    name = f"measured: {several}{per_node}x {kind.name}"
    return Machine(name, device, cluster, base.memory_bytes, base.peak_flops)


def _from_table(hardware: Hardware, name: str) -> Machine:
    kind = hardware.gpu
    return Machine(name, hardware.device("bf16"), hardware.cluster, kind.memory_bytes, kind.peak_flops("bf16"))


def _kind(facts: Facts, gpu: str | None) -> GpuModel:
    name = gpu if gpu is not None else facts.ranks[0].device
    kind = find_gpu(name)
    if kind is None:
        raise UserError(f"--facts: `{name}` is not in the table of GPUs. Write --gpu with a similar one.")
    return kind


def _measured_cluster(base: Cluster, facts: Facts, link: LinkFacts) -> Cluster:
    """Return the cluster with what was measured: of one machine its links, of several the network between them too."""
    host = {rank.rank: rank.hostname for rank in facts.ranks}
    inside = [pair for pair in link.pairs if host.get(pair.first) == host.get(pair.second)]
    across = [pair for pair in link.pairs if host.get(pair.first) != host.get(pair.second)]
    speed = bus_bandwidth(link, world=facts.world)
    found = replace(base, hop_seconds=_latency(inside, base.hop_seconds))
    if len(facts.hosts) == 1:
        return replace(found, link_bandwidth=speed)
    return replace(
        found,
        link_bandwidth=max(speed, median(pair.bytes_per_second for pair in inside) if inside else base.link_bandwidth),
        network_bandwidth=speed / base.ranks_per_node,  # a ring leaves each machine once: that is its whole bandwidth
        network_hop_seconds=_latency(across, base.network_hop_seconds),
    )


def _latency(pairs: Sequence[PairSpeed], otherwise: float) -> float:
    return median(pair.latency_seconds for pair in pairs) if pairs else otherwise
