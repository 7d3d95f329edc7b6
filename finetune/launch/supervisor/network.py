"""Addresses and ports of a host, and whether it reaches the others."""

import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

from finetune.errors import UserError

_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali")
"""Prefixes of interfaces that do not lead to another host."""

CONNECT_SECONDS = 1.0
"""Time limit of one check of all other hosts."""

Endpoint = tuple[str, int]  # an IPv4 address and a port


class Listener:
    """A port to which others connect to check that they can."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Accept and close all connections."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Close the port."""
        self._socket.close()


class Reachability:
    """The hosts that were reached recently."""

    def __init__(
        self,
        *,
        lost_after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[Iterable[Endpoint]], set[Endpoint]] | None = None,
    ) -> None:
        self._connect = connect or can_connect
        self._lost_after = lost_after_seconds
        self._clock = clock
        self._reached_at: dict[str, float] = {}

    def skip(self, seconds: float) -> None:
        """Extend the deadline of each host by a time in which this host could not check."""
        self._reached_at = {name: at + seconds for name, at in self._reached_at.items()}

    def update(self, others: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Connect to the others, given by name as address and port, and return the names of those that are reached."""
        reached = self._connect(others.values())
        now = self._clock()
        self._reached_at |= {name: now for name, endpoint in others.items() if endpoint in reached}
        return tuple(
            sorted(name for name in others if now - self._reached_at.get(name, -self._lost_after) < self._lost_after)
        )


def can_connect(endpoints: Iterable[Endpoint], *, seconds: float = CONNECT_SECONDS) -> set[Endpoint]:
    """Return the endpoints that accept a connection within this time."""
    waiting: dict[socket.socket, tuple[str, int]] = {}
    for endpoint in endpoints:
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        try:
            client.connect_ex(endpoint)
        except OSError:
            client.close()
            continue
        waiting[client] = endpoint
    reached, deadline = set(), time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for client in select.select([], list(waiting), [], left)[1]:
            endpoint = waiting.pop(client)
            if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                reached.add(endpoint)
            client.close()
    for client in waiting:
        client.close()
    return reached


def free_port() -> int:
    """Return a TCP port that is free right now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def own_address(interface: str | None) -> tuple[str, str]:
    """Return this host's IPv4 address and its interface: the named one, or the first that leads to other hosts.

    Raises UserError where there is none.
    """
    addresses = {
        name: address.address
        for name, interface_addresses in psutil.net_if_addrs().items()
        for address in interface_addresses
        if address.family == socket.AF_INET
    }
    if interface is not None:
        if interface not in addresses:
            raise UserError(
                f"--interface: this host has no `{interface}` with an IPv4 address. It has: {_names(addresses)}."
            )
        return addresses[interface], interface
    for name, address in addresses.items():
        if not name.startswith(_VIRTUAL):
            return address, name
    raise UserError(
        f"no interface leads to other hosts. Name one with --interface. This host has: {_names(addresses)}."
    )


def _names(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "none"
