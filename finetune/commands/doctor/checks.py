"""The checks of the facts: for each finding of `findings.toml`, a function and a row of a table."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from finetune.commands.doctor.facts import Facts, HostFacts, HubName
from finetune.commands.doctor.findings import Finding, make_finding
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
        yield {"torch": host.software.packages.get("torch", ""), "gpus": host.gpus}


def _driver_too_old(host: HostFacts, _: Facts) -> Iterator[Values]:
    built, driver = host.software.torch_cuda, host.gpus.driver_cuda
    is_older = built is not None and driver is not None and _major(built) > _major(driver)
    if is_older and host.software.num_torch_devices == 0:  # cuda-compat makes it work
        yield {"torch_cuda": built, "gpus": host.gpus}


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _torch_sees_no_gpu(host: HostFacts, facts: Facts) -> Iterator[Values]:
    is_explained = any((*_torch_build(host, facts), *_driver_too_old(host, facts)))
    if host.gpus.gpus and host.software.num_torch_devices == 0 and not is_explained:
        visible = host.variables.get("CUDA_VISIBLE_DEVICES", "unset")
        yield {"num_gpus": len(host.gpus.gpus), "visible": visible}


BUSY_SHARE = 0.05  # of the memory: more than drivers and a desktop need


def _gpu_in_use(host: HostFacts, _: Facts) -> Iterator[Values]:
    for gpu in host.gpus.gpus:
        if gpu.memory_used_bytes > BUSY_SHARE * gpu.memory_bytes:
            processes = [f"{name} (pid {number})" for number, name in gpu.processes.items()]
            yield {"gpu": gpu, "processes": processes or ["unknown"]}


def _p2p_off(host: HostFacts, _: Facts) -> Iterator[Values]:
    has_nvlink = any(link.startswith("NV") for link in host.gpus.links.values())
    if has_nvlink and host.variables.get("NCCL_P2P_DISABLE") == "1":
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


def _socket_interface(host: HostFacts, _: Facts) -> Iterator[Values]:
    interfaces = host.network.interfaces
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = host.variables.get(variable)
        if value and interfaces:
            chosen = chosen_interfaces(value, interfaces)
            if not any(each.is_up and not each.name.startswith(_VIRTUAL) for each in chosen):
                yield {
                    "variable": variable,
                    "value": value,
                    "existing": [interface.name for interface in interfaces],
                    "better": host.network.default_interface or "eth0",
                }


def _gloo_loopback(host: HostFacts, facts: Facts) -> Iterator[Values]:
    address, variables = host.network.host_address or "", host.variables
    is_launched_on_several = variables.get("WORLD_SIZE", "1") != variables.get("LOCAL_WORLD_SIZE", "1")
    is_loopback = address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in variables
    if is_loopback and (is_launched_on_several or len(facts.hosts) > 1):
        yield {"address": address, "better": host.network.default_interface or "eth0"}


def _absent_names(host: HostFacts, facts: Facts) -> list[HubName]:
    """Return what the job would load from a hub that does not answer."""
    if host.hub is None or host.hub.problem is None:
        return []
    return [name for name in facts.job if not name.is_cached]


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


_ON, _OFF, _ANY = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), ()

VARIABLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "each kernel waits for the previous one: training is much slower"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "each tensor is allocated by the driver: much slower"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "every collective is checked first"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "the host waits for every collective"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (_OFF, "a rank that has failed leaves the others hanging"),
    "NCCL_IB_DISABLE": (_ON, "InfiniBand is not used: traffic between machines goes over TCP"),
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
    "ecc": lambda host, _: ({"gpu": gpu} for gpu in host.gpus.gpus if gpu.has_bad_memory),
    "gpu-in-use": _gpu_in_use,
    "p2p-off": _p2p_off,
    "socket-interface": _socket_interface,
    "gloo-loopback": _gloo_loopback,
    "not-cached": _not_cached,
    "hub": _hub,
    "open-files": _open_files,
    "shared-memory": _shared_memory,
    "disk-full": lambda host, _: ({"disk": disk} for disk in host.disks if disk.free_bytes < FULL_BYTES),
    "build-lock": lambda host, _: ({"lock": lock} for lock in host.software.locks),
    "variable": _variable,
}
"""The findings about a machine, each with the function that yields the values of its texts, once per finding."""

LAUNCH_CHECKS: Mapping[str, Callable[[Facts], Iterable[Values]]] = {
    "versions": _versions,
    "clock": _clock,
    "slow-pair": _slow_pair,
    "nvlink-unused": _nvlink_unused,
}
"""The same about several ranks."""
