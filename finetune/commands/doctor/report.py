"""Prints facts and findings, as text or JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from rich.table import Table

from finetune.commands.doctor.checks import NOMINAL, compute_seconds, strategy_costs
from finetune.commands.doctor.facts import Facts, HostFacts, facts_as_json
from finetune.commands.doctor.subjects.findings import Finding, finding_as_json, format_finding
from finetune.commands.doctor.subjects.gpus import Gpu
from finetune.commands.doctor.subjects.links import pair_links
from finetune.commands.doctor.subjects.network import NetworkFacts
from finetune.commands.doctor.subjects.ranks import LinkFacts
from finetune.commands.printing import print_facts, print_json, print_table
from finetune.runtime.resources import format_size
from finetune.runtime.text.terminal import printable

_MAX_PAIRS = 12


def print_as_json(facts: Facts, findings: Sequence[Finding]) -> None:
    """Print facts and findings as one JSON object, which `--facts` reads."""
    print_json({"facts": facts_as_json(facts), "findings": [*map(finding_as_json, findings)]}, indent=1)


def print_report(facts: Facts, findings: Sequence[Finding]) -> None:
    """Print the machines, the measurements between ranks, and the findings."""
    for host in facts.hosts:
        if len(facts.hosts) > 1:
            print(printable(f"{host.hostname}:"))
        print_facts(_host_lines(host))
        for gap in host.unread:
            print(printable(f"unknown: {gap}"))
    if facts.link is not None:
        _print_link(facts, facts.link)
    print()
    for finding in findings:
        print(printable(format_finding(finding)))
    if not findings:
        print("nothing to fix")


def _host_lines(host: HostFacts) -> Iterator[tuple[str, str]]:
    system, software, gpus = host.system, host.software, host.gpus
    environment = f"{', WSL2' if system.is_wsl else ''}{', in a container' if system.is_container else ''}"
    yield "system", f"{system.platform}{environment}"
    yield "python", software.python
    yield "packages", ", ".join(f"{name} {number}" for name, number in software.packages.items())
    if gpus.driver is not None:
        built = f"torch has CUDA {software.torch_cuda}, NCCL {software.nccl}"
        yield "driver", f"{gpus.driver}, CUDA up to {gpus.driver_cuda}; {built}"
    for gpu in gpus.gpus:
        yield f"GPU {gpu.index}", _gpu_line(gpu)
    if gpus.topology is not None:
        links = Counter(pair_links(gpus.topology).values())
        yield "links", ", ".join(f"{count} x {link}" for link, count in links.items())
    cores = f"{system.usable_cores} usable of {system.num_cores}"
    yield "cores", f"{cores}, {len(system.numa)} NUMA nodes" if len(system.numa) > 1 else cores
    maximum = system.memory_limit_bytes
    limit = "" if maximum is None else f", the container may use {format_size(maximum)}"
    yield "memory", f"{format_size(system.available_bytes)} free of {format_size(system.memory_bytes)}{limit}"
    yield "open files", f"{system.files_soft:,}, which a run raises up to {system.files_hard:,} where it needs more"
    yield from _network_lines(host.network)
    for disk in host.storage.disks:
        speed = disk.write_bytes_per_second
        written = "" if speed is None else f", writes {format_size(round(speed))}/s"
        yield f"{disk.name} folder", f"{disk.folder} ({disk.filesystem}), {format_size(disk.free_bytes)} free{written}"
    if host.variables:
        yield "variables", " ".join(f"{name}={value}" for name, value in host.variables.items())


def _gpu_line(gpu: Gpu) -> str:
    parts = [f"{gpu.name}, {format_size(gpu.memory_bytes)}"]
    if gpu.capability is not None:
        parts.append(f"sm_{gpu.capability[0]}{gpu.capability[1]}")
    if gpu.power_limit_watts is not None:
        parts.append(f"{gpu.power_watts or 0:.0f} of {gpu.power_limit_watts:.0f} W")
    if gpu.temperature_celsius is not None:
        parts.append(f"{gpu.temperature_celsius} C")
    if gpu.clock_mhz is not None:
        parts.append(f"{gpu.clock_mhz} of {gpu.max_clock_mhz} MHz")
    if gpu.pcie_width:
        parts.append(
            f"PCIe {gpu.pcie_generation} x{gpu.pcie_width} (at most {gpu.max_pcie_generation} x{gpu.max_pcie_width})"
        )
    if gpu.ecc is not None:
        parts.append(f"ECC {'on' if gpu.ecc else 'off'}")
    if gpu.mig:
        parts.append("MIG")
    return ", ".join(parts)


def _network_lines(network: NetworkFacts) -> Iterator[tuple[str, str]]:
    if network.interfaces:
        states = (f"{link.name} {link.address}{'' if link.is_up else ' (down)'}" for link in network.interfaces)
        yield "interfaces", ", ".join(states)
    if network.infiniband:
        yield "InfiniBand", ", ".join(f"{port.device} {port.state} {port.rate}" for port in network.infiniband)
    hub = network.hub
    if hub is not None:
        answer = hub.problem or f"answers in {hub.seconds or 0:.2f} s"
        yield "hub", f"{hub.endpoint}: {'not contacted (HF_HUB_OFFLINE)' if hub.is_offline_wanted else answer}"


def _print_link(facts: Facts, link: LinkFacts) -> None:
    hosts = len({rank.hostname for rank in facts.ranks})
    print(f"\nall-reduce over {facts.world} ranks on {hosts} host{'s' * (hosts > 1)}, {link.backend}")
    world, table = facts.world, _table("size", "time", "algorithm bandwidth", "bus bandwidth")
    for speed in link.all_reduce:
        rate = speed.num_bytes / speed.seconds
        bus = 2 * (world - 1) / world * rate
        table.add_row(format_size(speed.num_bytes), _time(speed.seconds), _rate(rate), _rate(bus))
    print_table(table)
    _print_pairs(link)
    _print_strategies(facts)


def _print_pairs(link: LinkFacts) -> None:
    if len(link.pairs) < 2:
        return
    slowest = sorted(link.pairs, key=lambda pair: pair.bytes_per_second)[:_MAX_PAIRS]
    typical = median(pair.bytes_per_second for pair in link.pairs)
    shown = f"{len(slowest)} of {len(link.pairs)}; median {_rate(typical)}"
    print(f"\nmessages between two ranks, the slowest first ({shown})")
    table = _table("ranks", "latency", "bandwidth")
    for pair in slowest:
        table.add_row(f"{pair.first}-{pair.second}", _time(pair.latency_seconds), _rate(pair.bytes_per_second))
    print_table(table)


def _print_strategies(facts: Facts) -> None:
    computed = compute_seconds(facts)
    job = facts.job if facts.job is not None and facts.job.num_parameters else NOMINAL
    against = "" if computed is None else f", against about {_time(computed)} of computing"
    trained = f"{job.num_trained:,} of {job.num_parameters:,} parameters trained"
    print(f"\ncommunication per step of {job.file} ({trained}){against}")
    table = _table("strategy", "sent by a rank", "time", "of computing", "")
    for cost in strategy_costs(facts):
        share = "" if cost.share is None else f"{cost.share:.0%}"
        table.add_row(cost.name, format_size(round(cost.num_bytes)), _time(cost.seconds), share, cost.verdict)
    print_table(table)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    """Return a duration in a suitable unit.

    >>> _time(0.00012), _time(2.5)
    ('120 us', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bytes_per_second: float) -> str:
    return f"{format_size(round(bytes_per_second))}/s"
