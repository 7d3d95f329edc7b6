"""Several hosts on one machine: network namespaces, joined by a bridge; needs root.

Each host has an interface `eth0` with an address of its own, a loopback of its own, and whatever runs in it. Hosts can
be killed, suspended, slowed down and cut off from one another, and their links can have a delay and drop packets. The
file system is shared, as a cluster's is.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launching import ROOT, SETTINGS

NETWORK = "10.77.0"
_NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
"""What gives a host a hostname of its own: ranks look after the processes that they believe to be on their host."""

_TIMEOUT_SECONDS = 240.0
_made = itertools.count()


@dataclass
class Host:
    """A namespace, and the programs that were started in it."""

    name: str
    namespace: str
    address: str
    bridge: str
    programs: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def cable(self) -> str:
        """Return the name of the other end of its interface."""
        return f"{self.bridge}v{self.address.rpartition('.')[2]}"

    def begin(self, *words: str, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Start `python WORDS` on this host, its output in `log`."""
        with log.open("ab") as output:
            program = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *_NAMED, self.name, sys.executable, *words],
                env={**os.environ, **SETTINGS, **environment},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    def pids(self) -> list[int]:
        """Return all processes on this host."""
        found = _ip("netns", "pids", self.namespace)
        return [int(word) for word in found.split()]

    def kill(self) -> None:
        """Take the machine away: everything on it is gone at once, and no connection is closed by a last packet."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")
        self.send(signal.SIGKILL)
        for program in self.programs:
            program.wait()
        self.programs.clear()

    def boot(self) -> None:
        """Connect a machine that was killed to the network again."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def send(self, number: signal.Signals) -> None:
        """Send all processes on this host a signal: SIGSTOP suspends it."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def limit(self, rate: str) -> None:
        """Have it send no more than so much, `2mbit` for example."""
        words = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "1s")
        subprocess.run(["ip", "netns", "exec", self.namespace, *words], check=True)

    def round_trip_ms(self, other: "Host") -> float:
        """Return the median time of 9 datagrams that the other host sends back."""
        with other.python(_ECHO) as echo:
            assert echo.stdout is not None and echo.stdout.readline() == b"ready\n"
            with self.python(_PING, other.address) as ping:
                answer = ping.communicate(timeout=30)[0]
            echo.kill()
        return float(answer)

    def python(self, code: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start a short program on this host."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", code, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


_ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 7007))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(100))
"""

_PING = """
import socket, statistics, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(2)
seconds = []
while len(seconds) < 10:
    began = time.perf_counter()
    client.sendto(b"x", (sys.argv[1], 7007))
    client.recv(100)
    seconds.append(time.perf_counter() - began)
print(1000 * statistics.median(seconds[1:]))  # the first one waited for an address
"""


@contextmanager
def cluster(
    num_hosts: int, *, has_head: bool = False, delay_ms: float = 0.0, drop: float = 0.0
) -> Iterator[list[Host]]:
    """Yield hosts that reach one another, after one named `head` if asked for; what runs on them in the end is killed.

    A round trip takes twice the delay; `drop` is the share of packets that never arrive.
    """
    bridge = f"ft{os.getpid()}{chr(97 + next(_made) % 26)}"  # several at a time do not meet
    names = [*(["head"] if has_head else []), *(f"h{number}" for number in range(1, num_hosts + 1))]
    hosts = [Host(name, f"{bridge}-{n}", f"{NETWORK}.{n}", bridge) for n, name in enumerate(names, start=1)]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        with _delayed(hosts, delay_ms, drop) if delay_ms or drop else _bridged(hosts, bridge):
            yield hosts
    finally:
        for host in hosts:
            if Path("/run/netns", host.namespace).exists():
                host.send(signal.SIGKILL)
                _ip("netns", "del", host.namespace)
        for each in _bridges(bridge):
            subprocess.run(["ip", "link", "del", each], check=False, capture_output=True)


def partition(*groups: Sequence[Host]) -> None:
    """Cut the groups of hosts off from one another; one group: all reach one another again."""
    for number, group in enumerate(groups):
        bridge = group[0].bridge + str(number or "")
        if bridge not in _bridges(bridge):
            _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in group:
            _ip("link", "set", host.cable, "master", bridge)


@contextmanager
def _bridged(hosts: Sequence[Host], bridge: str) -> Iterator[None]:
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    for host in hosts:
        _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("link", "set", host.cable, "master", bridge, "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
    yield


@contextmanager
def _delayed(hosts: Sequence[Host], delay_ms: float, drop: float) -> Iterator[None]:
    places = [f"{host.namespace}/{host.address}" for host in hosts]
    command = [sys.executable, "-m", "tests.launch.delayed_link", "--delay-ms", str(delay_ms), "--drop", str(drop)]
    with subprocess.Popen([*command, *places], cwd=ROOT, stdout=subprocess.PIPE) as link:
        try:
            assert link.stdout is not None and link.stdout.readline() == b"ready\n"
            yield
        finally:
            link.kill()


def _bridges(beginning: str) -> list[str]:
    names = (path.name for path in Path("/sys/class/net").glob(f"{beginning}*"))
    return [name for name in names if "v" not in name]


def has_namespaces() -> bool:
    """Tell whether this machine lets us make network namespaces."""
    name = f"ftprobe{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def until(is_so: Callable[[], bool], *, seconds: float = _TIMEOUT_SECONDS) -> None:
    """Wait until it is so; fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.1)


def read_status(run_folder: Path) -> dict:
    """Return status.json; nothing before there is one."""
    try:
        return dict(json.loads((run_folder / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def orphans(hosts: Sequence[Host]) -> list[str]:
    """Return the command lines of what still runs on the hosts."""
    return [" ".join(psutil.Process(pid).cmdline()) for host in hosts for pid in host.pids() if psutil.pid_exists(pid)]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
