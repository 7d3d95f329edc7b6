"""Several hosts on one machine: network namespaces, joined by a bridge; needs root.

Each host has an interface `eth0` with an address of its own, a loopback of its own, and whatever runs in it. Hosts can
be killed. The file system is shared, as a cluster's is.
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
_TIMEOUT_SECONDS = 240.0
_made = itertools.count()


@dataclass
class Host:
    """A namespace, and the programs that were started in it."""

    name: str
    namespace: str
    address: str
    programs: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def begin(self, *words: str, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Start `python WORDS` on this host, its output in `log`."""
        with log.open("ab") as output:
            program = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, sys.executable, *words],
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
        """Take the machine away: everything on it is gone at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.programs:
            program.wait()
        self.programs.clear()


@contextmanager
def cluster(num_hosts: int) -> Iterator[list[Host]]:
    """Yield hosts that reach one another; whatever runs on them in the end is killed."""
    bridge = f"ft{os.getpid()}{chr(97 + next(_made) % 26)}"  # several at a time do not meet
    hosts = [Host(f"h{n}", f"{bridge}-{n}", f"{NETWORK}.{n}") for n in range(1, num_hosts + 1)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            cable = f"{bridge}v{number}"
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            if Path("/run/netns", host.namespace).exists():
                host.kill()
                _ip("netns", "del", host.namespace)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def has_namespaces() -> bool:
    """Tell whether this machine lets us make network namespaces."""
    name = f"ftprobe{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def until(is_so: Callable[[], bool], *, programs: Sequence["subprocess.Popen[bytes]"] = ()) -> None:
    """Wait until it is so; fails when it takes too long, or when one of the programs ends before."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not is_so():
        ended = [program for program in programs if program.poll() is not None]
        assert not ended or is_so(), f"{ended[0].args} ended with {ended[0].returncode}"
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
