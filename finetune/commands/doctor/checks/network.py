"""The network between machines, and the way to the hub."""

from collections.abc import Iterator, Sequence

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import HostFacts, HubFacts, Interface
from finetune.commands.doctor.facts.launch import Facts, JobFacts
from finetune.runtime.resources import format_size

_VIRTUAL = ("docker", "lo", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman")
_MIN_LOCKED_BYTES = 1 << 30


def check_network(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what keeps machines from reaching each other, or slows it."""
    is_many = len(facts.hosts) > 1 or host.variables.get("WORLD_SIZE", "1") != host.variables.get(
        "LOCAL_WORLD_SIZE", "1"
    )
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        yield from _interface_choice(host, variable, is_many=is_many)
    address = host.network.host_address
    if is_many and address is not None and address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in host.variables:
        name = host.network.default_interface or "eth0"
        yield must_fix(
            "gloo-loopback",
            f"the machine's own name is {address}, and no GLOO_SOCKET_IFNAME is set",
            why="gloo tells the other machines that address, at which they find themselves: the start hangs",
            fix=f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}",
        )
    yield from _infiniband(host, is_many=is_many)
    if host.network.hub is not None:
        yield from _hub(host.network.hub, facts.job)


def chosen_interfaces(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that NCCL takes for a value: a list of prefixes, `=` before whole names, `^` to exclude."""
    words = [word for word in value.lstrip("^=").split(",") if word]
    is_exact = value.lstrip("^").startswith("=")

    def matches(each: Interface) -> bool:
        return any(each.name == word if is_exact else each.name.startswith(word) for word in words)

    return [each for each in interfaces if matches(each) != value.startswith("^")]


def _interface_choice(host: HostFacts, variable: str, *, is_many: bool) -> Iterator[Finding]:
    value, interfaces = host.variables.get(variable), host.network.interfaces
    if not value or not interfaces:
        return
    real = next((each.name for each in interfaces if each.is_up and not each.name.startswith(_VIRTUAL)), "eth0")
    better = host.network.default_interface or real
    found = chosen_interfaces(value, interfaces)
    if not found:
        yield must_fix(
            "socket-interface",
            f"{variable}={value}, and there is no such interface ({', '.join(each.name for each in interfaces)})",
            why="the process group cannot be made: `no socket interface found`",
            fix=f"export {variable}={better}",
        )
    elif all(each.name.startswith(_VIRTUAL) or not each.is_up for each in found):
        finding = must_fix if is_many else should_fix
        yield finding(
            "socket-interface",
            f"{variable}={value} chooses {', '.join(each.name for each in found)}, which no other machine can reach",
            why="ranks of several machines wait for each other until the timeout",
            fix=f"export {variable}={better}",
        )


def _infiniband(host: HostFacts, *, is_many: bool) -> Iterator[Finding]:
    ports = host.network.infiniband
    active = [port for port in ports if port.state == "ACTIVE"]
    down = [f"{port.device}/{port.port} ({port.state})" for port in ports if port.state != "ACTIVE"]
    if down and (active or is_many):
        yield should_fix(
            "infiniband-down",
            f"InfiniBand ports without a link: {', '.join(down[:4])}{' ...' if len(down) > 4 else ''}",
            why="NCCL has fewer cards, or falls back to TCP",
            fix="`ibstat` shows the state; look at the cable and the subnet manager, or name the rest in NCCL_IB_HCA",
        )
    if not active:
        return
    if host.variables.get("NCCL_IB_DISABLE") == "1":
        yield should_fix(
            "infiniband-off",
            f"NCCL_IB_DISABLE=1 is set, and {len(active)} InfiniBand ports are active ({active[0].rate})",
            why="traffic between machines goes over TCP, ten times slower or more",
            fix="unset NCCL_IB_DISABLE",
        )
    locked = host.system.locked_memory_bytes
    if locked is not None and locked < _MIN_LOCKED_BYTES:
        yield should_fix(
            "locked-memory",
            f"a process may lock {format_size(locked)} of memory (`ulimit -l`), and there is InfiniBand",
            why="NCCL fails to register its buffers: `ibv_reg_mr failed`",
            fix="ulimit -l unlimited (docker: --ulimit memlock=-1; else /etc/security/limits.conf)",
        )
    if host.gpus.gpus and host.network.has_peer_memory is False and is_many:
        yield note(
            "gpudirect",
            "the kernel module nvidia_peermem is not loaded",
            why="without it, unless the kernel has DMA-BUF, the network cards read GPU memory through host memory",
            fix="sudo modprobe nvidia_peermem",
        )


def _hub(hub: HubFacts, job: JobFacts | None) -> Iterator[Finding]:
    absent = [each for each in job.names if not each.is_cached] if job is not None else []
    listed = ", ".join(f"{each.key}: {each.name}" for each in absent)
    if hub.is_offline_wanted and absent:
        yield must_fix(
            "hub-offline",
            f"HF_HUB_OFFLINE is set, and the local cache lacks {listed}",
            why="the run stops when it loads them",
            fix=_download(absent[0].key, absent[0].name),
        )
    elif hub.problem is not None:
        through = f" (through {hub.proxy})" if hub.proxy else ""
        finding = must_fix if absent else note
        yield finding(
            "hub",
            f"the hub {hub.endpoint} cannot be reached{through}: {hub.problem}",
            why=f"the run needs {listed}" if absent else "what is not in the local cache cannot be loaded",
            fix=_download(absent[0].key, absent[0].name)
            if absent
            else "set HTTPS_PROXY or HF_ENDPOINT (a mirror), or export HF_HUB_OFFLINE=1 to save each start 3 s",
        )


def _download(key: str, name: str) -> str:
    kind = " --repo-type dataset" if key.startswith("data.") else ""
    return f"HF_HUB_OFFLINE=0 hf download {name}{kind}   # with network access; then copy ~/.cache/huggingface"
