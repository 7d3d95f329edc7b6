"""Faults of the network between hosts: packets that are dropped, a link that is lost. Hosts are namespaces here."""

import json
import subprocess
import time

from tests.launch.cluster import Host

DROPPING = ("tbf", "rate", "300kbit", "burst", "2kb", "limit", "4kb")
"""What does not fit into a queue of two packets is dropped: most of a burst, seldom a single small packet."""


def port(host: Host) -> str:
    """Return the interface of this machine into which the host's cable is plugged."""
    (end,) = json.loads(_run("ip", "-j", "-n", host.namespace, "link", "show", "eth0"))
    links = json.loads(_run("ip", "-j", "link"))
    return str(next(link["ifname"] for link in links if link["ifindex"] == end["link_index"]))


def drop_packets(host: Host, *, seconds: float) -> None:
    """Have the packets to a host pass a narrow place for so long."""
    _run("tc", "qdisc", "add", "dev", port(host), "root", *DROPPING)
    time.sleep(seconds)
    _run("tc", "qdisc", "del", "dev", port(host), "root")


def cut(host: Host) -> None:
    """Take the host's link away."""
    _run("ip", "link", "set", port(host), "down")


def join(host: Host) -> None:
    """Give it back: both ends of the cable, since a host that dies leaves the network."""
    _run("ip", "link", "set", port(host), "up")
    _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
