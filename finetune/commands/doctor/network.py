"""The network of a machine, and its connection to the Hugging Face hub."""

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

from finetune.runtime.text.redact import redact_known


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    is_up: bool = True
    address: str = ""


@dataclass(frozen=True)
class HubFacts:
    """Whether the Hugging Face hub answers."""

    endpoint: str
    is_offline_wanted: bool = False  # HF_HUB_OFFLINE
    seconds: float | None = None  # until it answered
    problem: str | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """The interfaces of a machine."""

    interfaces: tuple[Interface, ...] = ()
    default_interface: str | None = None
    host_address: str | None = None  # to which the hostname resolves


def gather_network() -> NetworkFacts:
    """Return the interfaces and the address of the hostname."""
    host_address = None  # the one that gloo would use
    with suppress(OSError):
        host_address = socket.gethostbyname(socket.gethostname())
    interfaces, states = [], psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        address = next((entry.address for entry in addresses if entry.family == socket.AF_INET), "")
        if address:
            interfaces.append(Interface(name, name in states and states[name].isup, address))
    return NetworkFacts(
        interfaces=tuple(interfaces),
        default_interface=read_default_interface(Path("/proc/net/route")),
        host_address=host_address,
    )


def read_default_interface(file: Path) -> str | None:
    """Return the interface of the default route in the kernel's table."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


HUB_SECONDS = 4.0
_TRUE = {"1", "TRUE", "YES", "ON"}


def gather_hub(variables: Mapping[str, str]) -> HubFacts:
    """Return whether the hub answers within seconds, through the proxy if there is one; nothing is downloaded."""
    endpoint = variables.get("HF_ENDPOINT") or "https://huggingface.co"
    shown = redact_known(endpoint)
    if any(variables.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return HubFacts(shown, is_offline_wanted=True, problem="HF_HUB_OFFLINE is set")
    started = time.perf_counter()
    try:
        with suppress(HTTPError):  # an answer, too
            urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()
    except (OSError, ValueError, HTTPException) as error:
        return HubFacts(shown, problem=redact_known(str(error)))
    return HubFacts(shown, seconds=time.perf_counter() - started)
