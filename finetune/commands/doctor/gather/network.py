"""Network interfaces, InfiniBand, and whether the Hugging Face hub answers."""

import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from finetune.commands.doctor.facts.host import HubFacts, InfinibandPort, Interface, NetworkFacts
from finetune.runtime.hub import PROXIES
from finetune.runtime.text.redact import redacted_text

HUB_SECONDS = 4.0
_TRUE = {"1", "TRUE", "YES", "ON"}


def gather_network() -> NetworkFacts:
    """Return interfaces, the address of the machine's own name, and InfiniBand; the hub is asked apart."""
    modules = Path("/proc/modules")
    return NetworkFacts(
        interfaces=tuple(_interfaces()),
        default_interface=read_default_interface(Path("/proc/net/route")),
        host_address=_own_address(),
        infiniband=read_infiniband(Path("/sys/class/infiniband")),
        has_peer_memory="nvidia_peermem" in modules.read_text() if modules.exists() else None,
    )


def gather_hub(variables: Mapping[str, str]) -> HubFacts:
    """Return whether a connection to the hub can be opened within seconds; nothing is downloaded."""
    endpoint = variables.get("HF_ENDPOINT") or "https://huggingface.co"
    proxy = next((variables[name] for name in PROXIES if variables.get(name)), None)
    wanted = any(variables.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    place = urlsplit(proxy if proxy is not None and "//" in proxy else endpoint if proxy is None else f"http://{proxy}")
    facts = HubFacts(redacted_text(endpoint), wanted, None if proxy is None else redacted_text(proxy))
    if wanted:
        return facts
    port = place.port or (443 if place.scheme == "https" else 80)
    started = time.perf_counter()
    try:
        socket.create_connection((place.hostname or "huggingface.co", port), timeout=HUB_SECONDS).close()
    except OSError as error:
        where = "the proxy" if proxy is not None else place.hostname
        return HubFacts(facts.endpoint, wanted, facts.proxy, None, f"{where}, port {port}: {error}")
    return HubFacts(facts.endpoint, wanted, facts.proxy, time.perf_counter() - started)


def read_default_interface(file: Path) -> str | None:
    """Return the interface of the default route in the kernel's table."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def read_infiniband(folder: Path) -> tuple[InfinibandPort, ...]:
    """Return the ports of all adapters, as the kernel describes them."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        words = {name: _word(port / name) for name in ("state", "rate", "link_layer")}
        state = words["state"].rpartition(":")[2].strip()  # `4: ACTIVE`
        found.append(
            InfinibandPort(port.parts[-3], int(port.name), state, words["rate"], words["link_layer"] or "InfiniBand")
        )
    return tuple(found)


def _word(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _interfaces() -> Iterator[Interface]:
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        address = next((each.address for each in addresses if each.family == socket.AF_INET), "")
        if address:
            state = states.get(name)
            yield Interface(name, bool(state and state.isup), address, state.speed if state else 0)


def _own_address() -> str | None:
    """Return the address that gloo would take, that of the machine's name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
