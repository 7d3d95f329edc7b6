"""The checks of the facts: for each finding of `findings.toml`, a function and a row of a table."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from finetune.commands.doctor.facts import Facts, HostFacts
from finetune.commands.doctor.findings import Finding, make_finding
from finetune.commands.doctor.gpus import GpuFacts
from finetune.commands.doctor.job_facts import HubName
from finetune.commands.doctor.network import Interface
from finetune.commands.doctor.ranks import AllReduceSpeed
from finetune.runtime.resources import files_needed


def check_facts(facts: Facts) -> list[Finding]:
    """Return the findings, the most severe first; a finding of several machines is listed once, with their names."""
    hosts_by_finding: dict[Finding, list[str]] = {}
    for host in facts.hosts:
        for key, check in HOST_CHECKS.items():
            for values in check(host, facts):
                hosts_by_finding.setdefault(make_finding(key, values), []).append(host.hostname)
    hostnames = [host.hostname for host in facts.hosts]
    for key, check_launch in LAUNCH_CHECKS.items():
        for values in check_launch(facts) if facts.world > 1 else ():
            hosts_by_finding[make_finding(key, values)] = hostnames
    merged = [
        replace(each, hosts=() if len(set(names)) == len(hostnames) else tuple(dict.fromkeys(names)))
        for each, names in hosts_by_finding.items()
    ]
    return sorted(merged, key=lambda each: each.severity)


Values = Mapping[str, Any]
"""What the texts of a finding are filled with."""

# Drivers and GPUs


def _torch_build(host: HostFacts, _: Facts) -> Iterator[Values]:
    if (host.gpus.gpus or host.gpus.has_driver) and host.software.torch_cuda is None:
        yield {"torch": host.software.packages.get("torch", ""), "wheel": _wheel(host.gpus)}


def _driver_too_old(host: HostFacts, _: Facts) -> Iterator[Values]:
    built, driver = host.software.torch_cuda, host.gpus.driver_cuda
    is_older = built is not None and driver is not None and _numbers(built)[0] > _numbers(driver)[0]
    if is_older and host.software.num_torch_devices == 0:  # cuda-compat makes it work
        yield {"torch_cuda": built, "gpus": host.gpus, "wheel": _wheel(host.gpus)}


_WHEELS = ((13, 0), (12, 8), (12, 6))
"""Versions of CUDA for which download.pytorch.org has builds of torch, the newest first."""


def _wheel(gpus: GpuFacts) -> str:
    """Return the newest build of torch that the driver runs."""
    offered = _numbers(gpus.driver_cuda or "13.0")
    major, minor = next((version for version in _WHEELS if version <= offered), _WHEELS[-1])
    return f"cu{major}{minor}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _torch_sees_no_gpu(host: HostFacts, facts: Facts) -> Iterator[Values]:
    is_explained = any((*_torch_build(host, facts), *_driver_too_old(host, facts), *_hidden_gpus(host, facts)))
    if host.gpus.gpus and host.software.num_torch_devices == 0 and not is_explained:
        yield {"num_gpus": len(host.gpus.gpus)}


def _hidden_gpus(host: HostFacts, _: Facts) -> Iterator[Values]:
    visible = host.variables.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if host.gpus.gpus and (visible == "" or visible.startswith("-")):
        yield {"visible": visible, "num_gpus": len(host.gpus.gpus)}


BUSY_SHARE = 0.05  # of the memory: more than drivers and a desktop need


def _gpu_in_use(host: HostFacts, _: Facts) -> Iterator[Values]:
    for gpu in host.gpus.gpus:
        if gpu.memory_used_bytes > BUSY_SHARE * gpu.memory_bytes:
            processes = [f"{name} (pid {number})" for number, name in gpu.processes.items()]
            yield {"gpu": gpu, "processes": processes or ["unknown"]}


# Links between the GPUs of a machine

_ADA_DRIVER = (550, 40, 7)
"""The first driver that reports that the RTX 40 series has no P2P (accelerate: `check_cuda_p2p_ib_support`)."""


def _no_p2p(host: HostFacts, _: Facts) -> Iterator[Values]:
    driver, gpus = host.gpus.driver, host.gpus.gpus
    is_ada = len(gpus) > 1 and any("RTX 40" in gpu.name for gpu in gpus)
    if is_ada and driver is not None and _numbers(driver) < _ADA_DRIVER and not _is_p2p_off(host):
        yield {"driver": driver}


def _is_p2p_off(host: HostFacts) -> bool:
    return host.variables.get("NCCL_P2P_DISABLE") == "1"


def _p2p_pairs(host: HostFacts, facts: Facts, *, links: Sequence[str]) -> list[str]:
    """Return the pairs of GPUs with such links between which NCCL may use P2P."""
    if _is_p2p_off(host) or any(_no_p2p(host, facts)):
        return []
    return [pair for pair, link in host.gpus.links.items() if link in links and pair not in host.gpus.without_p2p]


def _p2p_across_sockets(host: HostFacts, facts: Facts) -> Iterator[Values]:
    if pairs := _p2p_pairs(host, facts, links=("SYS",)):
        yield {"pairs": pairs}


def _p2p_iommu(host: HostFacts, facts: Facts) -> Iterator[Values]:
    pairs = _p2p_pairs(host, facts, links=("PIX", "PXB", "PHB", "NODE"))
    if pairs and host.system.translates_addresses and not host.system.is_virtual:
        yield {"pairs": pairs}


def _p2p_off(host: HostFacts, _: Facts) -> Iterator[Values]:
    if _is_p2p_off(host) and any(link.startswith("NV") for link in host.gpus.links.values()):
        yield {}


# The network

_VIRTUAL = ("docker", "lo", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman")


def chosen_interfaces(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that NCCL uses for a value: a list of prefixes, `=` before whole names, `^` to exclude."""
    words = [word for word in value.lstrip("^=").split(",") if word]
    is_exact = value.lstrip("^").startswith("=")

    def matches(interface: Interface) -> bool:
        return any(interface.name == word if is_exact else interface.name.startswith(word) for word in words)

    return [interface for interface in interfaces if matches(interface) != value.startswith("^")]


def _usable_interfaces(host: HostFacts) -> list[str]:
    """Return the interfaces that other machines may reach, the one of the default route first."""
    default, interfaces = host.network.default_interface, host.network.interfaces
    usable = [link.name for link in interfaces if link.is_up and not link.name.startswith(_VIRTUAL)]
    return list(dict.fromkeys([*([default] if default else []), *usable])) or ["eth0"]


def _socket_interface(host: HostFacts, _: Facts) -> Iterator[Values]:
    usable, interfaces = _usable_interfaces(host), host.network.interfaces
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = host.variables.get(variable)
        if value and interfaces:
            chosen = [interface.name for interface in chosen_interfaces(value, interfaces)]
            if not set(chosen) & set(usable):
                yield {
                    "variable": variable,
                    "value": value,
                    "chosen": chosen or ["no interface"],
                    "existing": [interface.name for interface in interfaces],
                    "better": usable[0],
                }


def _gloo_loopback(host: HostFacts, facts: Facts) -> Iterator[Values]:
    address, variables = host.network.host_address or "", host.variables
    is_launched_on_several = variables.get("WORLD_SIZE", "1") != variables.get("LOCAL_WORLD_SIZE", "1")
    is_loopback = address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in variables
    if is_loopback and (is_launched_on_several or len(facts.hosts) > 1):
        yield {"address": address, "better": _usable_interfaces(host)[0]}


def _infiniband_down(host: HostFacts, facts: Facts) -> Iterator[Values]:
    down = [port for port in host.network.infiniband if port.state != "ACTIVE"]
    if down and (len(facts.hosts) > 1 or len(down) < len(host.network.infiniband)):
        yield {"ports": down}


def _infiniband_off(host: HostFacts, _: Facts) -> Iterator[Values]:
    active = [port for port in host.network.infiniband if port.state == "ACTIVE"]
    if active and host.variables.get("NCCL_IB_DISABLE") == "1":
        yield {"num_active": len(active), "rate": active[0].rate}


def _absent_names(host: HostFacts, facts: Facts) -> list[HubName]:
    """Return what the job would load from a hub that does not answer."""
    if host.hub is None or host.hub.problem is None:
        return []
    return [name for name in facts.job.names if not name.is_cached]


def _not_cached(host: HostFacts, facts: Facts) -> Iterator[Values]:
    if host.hub is not None and (absent := _absent_names(host, facts)):
        yield {"hub": host.hub, "problem": host.hub.problem, "absent": absent}


def _hub(host: HostFacts, facts: Facts) -> Iterator[Values]:
    hub = host.hub
    if hub is not None and hub.problem is not None and not hub.is_offline_wanted and not _absent_names(host, facts):
        yield {"hub": hub}


# Limits, disks, software and variables

SMALL_SHARED_BYTES = 1_000_000_000
"""Shared memory below which loader processes may fail to pass on batches; a container's default is 64 MB."""

FULL_BYTES = 1_000_000_000
"""Free space below which a disk counts as full."""


def _open_files(host: HostFacts, facts: Facts) -> Iterator[Values]:
    limit, needed = host.system.max_open_files, files_needed(facts.world)
    if limit < needed:
        yield {"limit": limit, "needed": needed, "world": facts.world}


def _shared_memory(host: HostFacts, _: Facts) -> Iterator[Values]:
    size = host.system.shared_memory_bytes
    if size is not None and size < SMALL_SHARED_BYTES:
        yield {"size": size}


def _disk_room(host: HostFacts, facts: Facts) -> Iterator[Values]:
    for disk in host.disks:
        if disk.key == "run.folder" and facts.job.bytes_to_write > disk.free_bytes:
            yield {"disk": disk, "needed": facts.job.bytes_to_write}


_ON, _OFF, _ANY = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), ()

VARIABLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "each kernel waits for the previous one: training is much slower"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "each tensor is allocated by the driver: much slower"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "every collective is checked first"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "the host waits for every collective"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (_OFF, "a rank that has failed leaves the others hanging"),
    "NCCL_SHM_DISABLE": (_ON, "GPUs without P2P then communicate over TCP"),
    "NCCL_ALGO": (_ANY, "NCCL no longer chooses the algorithm by size and topology"),
    "NCCL_PROTO": (_ANY, "NCCL no longer chooses the protocol by size and topology"),
    "NCCL_P2P_LEVEL": (_ANY, "NCCL no longer decides by the platform where P2P is used"),
    "NVIDIA_TF32_OVERRIDE": (_OFF, "fp32 matrix products do not use TF32, regardless of train.tf32"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (_ON, "TF32 is used regardless of train.tf32: losses change"),
    "TORCHDYNAMO_DISABLE": (_ON, "model.compile has no effect"),
    "TORCH_COMPILE_DISABLE": (_ON, "model.compile has no effect"),
    "LD_PRELOAD": (_ANY, "its libraries may replace malloc or CUDA"),
}
"""Variables, the values that change a run (in lower case; `_ANY`: all but an empty one), and how."""


def _variable(host: HostFacts, _: Facts) -> Iterator[Values]:
    for name, (values, why) in VARIABLES.items():
        value = host.variables.get(name, "")
        if value.lower() in values or (values == _ANY and value):
            yield {"variable": name, "value": value, "why": why}


# Ranks and the links between them

MAX_CLOCK_SECONDS = 1.0

SLOW_RANK = 0.7
"""Share of the median speed below which a rank slows down the others."""

SLOW_PAIR = 0.5
"""Share of the median speed of pairs within a machine, or across machines."""

_NVLINK_BYTES_PER_SECOND = 20e9
"""A lower speed means that NVLink is not used: PCIe 4 reaches this one, and NVLink is several times faster."""


def _versions(facts: Facts) -> Iterator[Values]:
    for name in sorted({name for rank in facts.ranks for name in rank.versions}):
        versions = {rank.rank: rank.versions.get(name, "missing") for rank in facts.ranks}
        if len(set(versions.values())) > 1:
            yield {"name": name, "ranks_by_value": _ranks_by_value(versions)}


def _ranks_by_value(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return "; ".join(f"{value} on rank {', '.join(map(str, numbers))}" for value, numbers in ranks.items())


def _clock(facts: Facts) -> Iterator[Values]:
    for hostname, seconds in {rank.hostname: rank.clock_offset_seconds for rank in facts.ranks}.items():
        if abs(seconds) > MAX_CLOCK_SECONDS:
            yield {"hostname": hostname, "seconds": seconds}


def _rank_devices(facts: Facts) -> Iterator[Values]:
    devices = {rank.rank: rank.device for rank in facts.ranks}
    if len(set(devices.values())) > 1:
        yield {"ranks_by_value": _ranks_by_value(devices)}


def _slow_rank(facts: Facts) -> Iterator[Values]:
    speeds: dict[str, float] = {}
    for rank in facts.ranks:  # ranks on one CPU share its time: the fastest of a machine counts
        name = rank.hostname if rank.device == "cpu" else f"rank {rank.rank} ({rank.hostname})"
        speeds[name] = max(speeds.get(name, 0.0), rank.flops_per_second)
    typical = median(speeds.values())
    for name, speed in speeds.items():
        if speed < SLOW_RANK * typical:
            yield {"name": name, "share": speed / typical}


def _slow_pair(facts: Facts) -> Iterator[Values]:
    """Yield the pairs that are slower than others within a machine, or than others across machines."""
    if facts.link is None:
        return
    by_number = {rank.rank: rank for rank in facts.ranks}
    links = {host.hostname: host.gpus.links for host in facts.hosts}
    pairs = [(by_number[pair.first], by_number[pair.second], pair) for pair in facts.link.pairs]
    within = [entry for entry in pairs if entry[0].hostname == entry[1].hostname]
    across = [entry for entry in pairs if entry[0].hostname != entry[1].hostname]
    for group in (within if facts.link.backend == "nccl" else [], across):  # processes of one CPU have no link
        typical = median(pair.bytes_per_second for _, _, pair in group) if group else 0.0
        for first, second, pair in group:
            if pair.bytes_per_second < SLOW_PAIR * typical:
                link = links[first.hostname].get(f"{first.local_rank}-{second.local_rank}", "an unknown link")
                shown = link if group is within else "the network"
                yield {"first": first, "second": second, "pair": pair, "link": shown, "typical": typical}


def _nvlink_unused(facts: Facts) -> Iterator[Values]:
    links = [link for host in facts.hosts for link in host.gpus.links.values()]
    is_nvlinked = bool(links) and len(facts.hosts) == 1 and all(link.startswith("NV") for link in links)
    if facts.link is None or facts.link.backend != "nccl" or not is_nvlinked:
        return
    speed = bus_bandwidth(facts.link.all_reduce[-1], world=facts.world)
    if speed < _NVLINK_BYTES_PER_SECOND:
        yield {"speed": speed}


def bus_bandwidth(speed: AllReduceSpeed, *, world: int) -> float:
    """Return the bytes per second that each rank sends in an all-reduce: 2 (n-1)/n of its size."""
    return 2 * (world - 1) / world * speed.num_bytes / speed.seconds


HOST_CHECKS: Mapping[str, Callable[[HostFacts, Facts], Iterable[Values]]] = {
    "driver": lambda host, _: [{"problem": host.gpus.problem}] if host.gpus.problem is not None else [],
    "torch-build": _torch_build,
    "driver-too-old": _driver_too_old,
    "torch-sees-no-gpu": _torch_sees_no_gpu,
    "hidden-gpus": _hidden_gpus,
    "ecc": lambda host, _: ({"gpu": gpu} for gpu in host.gpus.gpus if gpu.has_bad_memory),
    "throttled": lambda host, _: ({"gpu": gpu} for gpu in host.gpus.gpus if gpu.throttle_reasons),
    "gpu-in-use": _gpu_in_use,
    "no-p2p": _no_p2p,
    "p2p-across-sockets": _p2p_across_sockets,
    "p2p-iommu": _p2p_iommu,
    "p2p-off": _p2p_off,
    "socket-interface": _socket_interface,
    "gloo-loopback": _gloo_loopback,
    "infiniband-down": _infiniband_down,
    "infiniband-off": _infiniband_off,
    "not-cached": _not_cached,
    "hub": _hub,
    "open-files": _open_files,
    "shared-memory": _shared_memory,
    "disk-full": lambda host, _: ({"disk": disk} for disk in host.disks if disk.free_bytes < FULL_BYTES),
    "disk-room": _disk_room,
    "build-lock": lambda host, _: ({"lock": lock} for lock in host.software.locks),
    "variable": _variable,
}
"""The findings about a machine, each with the function that yields the values of its texts, once per finding."""

LAUNCH_CHECKS: Mapping[str, Callable[[Facts], Iterable[Values]]] = {
    "versions": _versions,
    "clock": _clock,
    "rank-devices": _rank_devices,
    "slow-rank": _slow_rank,
    "slow-pair": _slow_pair,
    "nvlink-unused": _nvlink_unused,
}
"""The same about several ranks."""
