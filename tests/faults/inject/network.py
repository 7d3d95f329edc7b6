"""Faults of the network between hosts: packets that are dropped, a link that is lost. Hosts are namespaces here."""

import subprocess
import time

from tests.launch.cluster import Host

DROPPING = ("tbf", "rate", "300kbit", "burst", "2kb", "limit", "4kb")
"""What does not fit into a queue of two packets is dropped: most of a burst, seldom a single small packet."""


def port(host: Host) -> str:
    """Return the interface at which a host's cable is plugged into the bridge, see tests/launch/cluster.py."""
    bridge, number = host.namespace.rsplit("-", 1)
    return f"{bridge}v{int(number) - 1}"


def drop_packets(host: Host, *, seconds: float) -> None:
    """Have the packets to a host pass a narrow place for so long."""
    _run("tc", "qdisc", "add", "dev", port(host), "root", *DROPPING)
    time.sleep(seconds)
    _run("tc", "qdisc", "del", "dev", port(host), "root")


def cut(host: Host) -> None:
    """Take the host's link away."""
    _run("ip", "link", "set", port(host), "down")


def join(host: Host) -> None:
    """Give it back."""
    _run("ip", "link", "set", port(host), "up")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
