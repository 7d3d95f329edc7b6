"""The network between machines, and the connection to the Hugging Face hub."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from finetune.commands.doctor.findings import Finding, Severity, finding
from finetune.commands.doctor.job_facts import HubName
from finetune.runtime.text.redact import redact_known
from finetune.runtime.upstream import PROXIES


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    is_up: bool
    address: str = ""


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str  # "ACTIVE", "DOWN", "INIT"
    rate: str = ""
    link_layer: str = "InfiniBand"


@dataclass(frozen=True)
class HubFacts:
    """Whether the Hugging Face hub answers."""

    endpoint: str
    is_offline_wanted: bool = False  # HF_HUB_OFFLINE
    proxy: str | None = None
    seconds: float | None = None  # until a connection was open
    problem: str | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """Interfaces, InfiniBand and the connection to the hub."""

    interfaces: tuple[Interface, ...] = ()
    default_interface: str | None = None
    host_address: str | None = None  # to which the hostname resolves
    infiniband: tuple[InfinibandPort, ...] = ()
    has_peer_memory: bool | None = None  # the module nvidia_peermem is loaded
    hub: HubFacts | None = None


HUB_SECONDS = 4.0
_TRUE = {"1", "TRUE", "YES", "ON"}


def gather_network() -> NetworkFacts:
    """Return interfaces, the address of the hostname, and InfiniBand."""
    modules = Path("/proc/modules")
    own_address = None  # the one that gloo would use
    with suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    interfaces, states = [], psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        address = next((entry.address for entry in addresses if entry.family == socket.AF_INET), "")
        if address:
            state = states.get(name)
            interfaces.append(Interface(name, bool(state and state.isup), address))
    return NetworkFacts(
        interfaces=tuple(interfaces),
        default_interface=read_default_interface(Path("/proc/net/route")),
        host_address=own_address,
        infiniband=read_infiniband(Path("/sys/class/infiniband")),
        has_peer_memory="nvidia_peermem" in modules.read_text() if modules.exists() else None,
    )


def gather_hub(variables: Mapping[str, str]) -> HubFacts:
    """Return whether a connection to the hub can be opened within seconds; nothing is downloaded."""
    endpoint = variables.get("HF_ENDPOINT") or "https://huggingface.co"
    proxy = next((variables[name] for name in PROXIES if variables.get(name)), None)
    is_offline = any(variables.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    address = urlsplit(
        proxy if proxy is not None and "//" in proxy else endpoint if proxy is None else f"http://{proxy}"
    )
    facts = HubFacts(redact_known(endpoint), is_offline, None if proxy is None else redact_known(proxy))
    if is_offline:
        return facts
    port = address.port or (443 if address.scheme == "https" else 80)
    started = time.perf_counter()
    try:
        socket.create_connection((address.hostname or "huggingface.co", port), timeout=HUB_SECONDS).close()
    except OSError as error:
        where = "the proxy" if proxy is not None else address.hostname
        return HubFacts(facts.endpoint, is_offline, facts.proxy, None, f"{where}, port {port}: {error}")
    return HubFacts(facts.endpoint, is_offline, facts.proxy, time.perf_counter() - started)


def read_default_interface(file: Path) -> str | None:
    """Return the interface of the default route in the kernel's table."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def read_infiniband(folder: Path) -> tuple[InfinibandPort, ...]:
    """Return the ports of all adapters, as the kernel describes them."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        words = dict.fromkeys(("state", "rate", "link_layer"), "")
        for name in words:
            with suppress(OSError):
                words[name] = (port / name).read_text().strip()
        state = words["state"].rpartition(":")[2].strip()  # `4: ACTIVE`
        ports.append(
            InfinibandPort(port.parts[-3], int(port.name), state, words["rate"], words["link_layer"] or "InfiniBand")
        )
    return tuple(ports)


_VIRTUAL = ("docker", "lo", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman")
_MIN_LOCKED_BYTES = 1 << 30


def check_interfaces(facts: NetworkFacts, variables: Mapping[str, str], *, is_multi_host: bool) -> Iterator[Finding]:
    """Yield the interfaces of NCCL and gloo that other machines cannot reach."""
    usable = [link.name for link in facts.interfaces if link.is_up and not link.name.startswith(_VIRTUAL)]
    better = facts.default_interface or next(iter(usable), "eth0")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(variable)
        if not value or not facts.interfaces:
            continue
        chosen = [link.name for link in chosen_interfaces(value, facts.interfaces)]
        if not chosen:
            existing = ", ".join(link.name for link in facts.interfaces)
            yield finding("socket-interface/absent", variable=variable, value=value, existing=existing, better=better)
        elif not set(chosen) & set(usable):
            severity = Severity.MUST_FIX if is_multi_host else Severity.SHOULD_FIX
            yield finding(
                "socket-interface/unreachable",
                severity=severity,
                variable=variable,
                value=value,
                chosen=chosen,
                better=better,
            )
    address = facts.host_address or ""
    if is_multi_host and address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in variables:
        name = facts.default_interface or "eth0"
        yield finding("gloo-loopback", address=address, name=name)


def chosen_interfaces(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that NCCL uses for a value: a list of prefixes, `=` before whole names, `^` to exclude."""
    words = [word for word in value.lstrip("^=").split(",") if word]
    is_exact = value.lstrip("^").startswith("=")

    def matches(interface: Interface) -> bool:
        return any(interface.name == word if is_exact else interface.name.startswith(word) for word in words)

    return [interface for interface in interfaces if matches(interface) != value.startswith("^")]


def check_infiniband(
    facts: NetworkFacts, variables: Mapping[str, str], *, is_multi_host: bool, has_gpu: bool, locked_bytes: int | None
) -> Iterator[Finding]:
    """Yield the problems of InfiniBand between machines; `locked_bytes` is the limit of locked memory."""
    ports = facts.infiniband
    active = [port for port in ports if port.state == "ACTIVE"]
    down = [f"{port.device}/{port.port} ({port.state})" for port in ports if port.state != "ACTIVE"]
    if down and (active or is_multi_host):
        yield finding("infiniband-down", ports=", ".join(down[:4]), more=" ..." if len(down) > 4 else "")
    if not active:
        return
    if variables.get("NCCL_IB_DISABLE") == "1":
        yield finding("infiniband-off", num_active=len(active), active=active)
    if locked_bytes is not None and locked_bytes < _MIN_LOCKED_BYTES:
        yield finding("locked-memory", locked_bytes=locked_bytes)
    if has_gpu and facts.has_peer_memory is False and is_multi_host:
        yield finding("gpudirect")


def check_hub(hub: HubFacts, names: Sequence[HubName]) -> Iterator[Finding]:
    """Yield the problems of the connection to the hub, from which a job loads these names."""
    absent = [name for name in names if not name.is_cached]
    listed = ", ".join(f"{name.key}: {name.name}" for name in absent)
    if hub.is_offline_wanted and absent:
        yield finding("hub-offline", listed=listed, fix=_download(absent[0].key, absent[0].name))
    elif hub.problem is not None:
        through = f" (through {hub.proxy})" if hub.proxy else ""
        severity = Severity.MUST_FIX if absent else Severity.NOTE
        yield finding(
            "hub",
            severity=severity,
            hub=hub,
            through=through,
            why=f"the run needs {listed}" if absent else "models and datasets outside the local cache cannot be loaded",
            fix=_download(absent[0].key, absent[0].name)
            if absent
            else "set HTTPS_PROXY or HF_ENDPOINT (a mirror), or export HF_HUB_OFFLINE=1 to save each start 3 s",
        )


def _download(key: str, name: str) -> str:
    option = " --repo-type dataset" if key.startswith("data.") else ""
    return f"HF_HUB_OFFLINE=0 hf download {name}{option}   # with network access; then copy ~/.cache/huggingface"
