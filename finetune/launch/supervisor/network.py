"""Addresses and ports of a host, and whether it reaches the others."""

import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

from finetune.errors import UserError

_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali")
"""Beginnings of the names of interfaces that do not lead to another host."""

CONNECT_SECONDS = 1.0
"""For one look at all other hosts."""

Place = tuple[str, int]  # an IPv4 address and a port


class Listener:
    """A port that others connect to, only to see that they can."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Accept and close whatever has connected."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Close the port."""
        self._socket.close()


class Reachability:
    """Which hosts were reached not long ago."""

    def __init__(
        self,
        *,
        lost_after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[Iterable[Place]], set[Place]] | None = None,
    ) -> None:
        self._connect = connect or can_connect
        self._lost_after = lost_after_seconds
        self._clock = clock
        self._reached_at: dict[str, float] = {}

    def skip(self, seconds: float) -> None:
        """Forgive so long a time without a connection: this host could not look."""
        self._reached_at = {name: at + seconds for name, at in self._reached_at.items()}

    def update(self, others: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Connect to the others, given by name as address and port, and return the names of those that are reached."""
        reached = self._connect(others.values())
        now = self._clock()
        self._reached_at |= {name: now for name, place in others.items() if place in reached}
        return tuple(
            sorted(name for name in others if now - self._reached_at.get(name, -self._lost_after) < self._lost_after)
        )


def can_connect(places: Iterable[Place], *, seconds: float = CONNECT_SECONDS) -> set[Place]:
    """Return the places, an IPv4 address and a port each, to which a connection is made within the seconds."""
    waiting: dict[socket.socket, tuple[str, int]] = {}
    for place in places:
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        try:
            client.connect_ex(place)
        except OSError:
            client.close()
            continue
        waiting[client] = place
    reached, deadline = set(), time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for client in select.select([], list(waiting), [], left)[1]:
            place = waiting.pop(client)
            if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                reached.add(place)
            client.close()
    for client in waiting:
        client.close()
    return reached


def free_port() -> int:
    """Return a TCP port that is free right now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def own_address(interface: str | None) -> tuple[str, str]:
    """Return this host's IPv4 address and the interface that has it; the first that leads out unless one is named.

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
                f"--interface: there is no `{interface}` with an IPv4 address here. Seen: {_names(addresses)}."
            )
        return addresses[interface], interface
    for name, address in addresses.items():
        if not name.startswith(_VIRTUAL):
            return address, name
    raise UserError(f"no interface leads to other hosts. Name one with --interface. Seen: {_names(addresses)}.")


def _names(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "none"
