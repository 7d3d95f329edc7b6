"""A chain on two hosts: the supervisors go on by themselves, whatever happens to a host, its link or a rank."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults import judge
from tests.faults.evidence import Run
from tests.faults.inject import network
from tests.faults.inject.moments import StepWatch, wait_until
from tests.faults.job import host_overrides, write_job
from tests.faults.schedule import HOST_STEPS, Chain, Fault
from tests.launch.cluster import Host, cluster, orphans

LOST_AFTER_SECONDS, DROP_SECONDS = 4, 4.0
LIMIT_SECONDS = 300.0
ATTEMPT = Path("supervisors") / "attempt.json"


class HostChain:
    """One chain on two hosts while it runs."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._folder = chain, folder
        self._job = write_job(folder)
        self._run = Run(folder / "run")
        self._hosts: dict[str, Host] = {}
        self.struck: list[str] = []
        self.notes: list[str] = []

    def run(self, reference: Run) -> list[str]:
        """Run it to its end and return what is wrong."""
        with cluster(2) as hosts:
            self._hosts = {host.name: host for host in hosts}
            for host in hosts:
                self._supervise(host)
            watch = StepWatch(self._run.folder)
            for fault in self._chain.faults:
                step = fault.moment.step or 0
                if not self._until(lambda step=step: watch.step() >= step):
                    break
                time.sleep(fault.moment.seconds)
                self._strike(fault)
            is_over = wait_until(self._has_ended, has_ended=lambda: False, timeout_seconds=LIMIT_SECONDS)
            codes = [program.poll() for host in hosts for program in host.programs]
            wait_until(lambda: not orphans(hosts), has_ended=lambda: False, timeout_seconds=20)
            left = orphans(hosts)
        return self._violations(codes, left, is_over=is_over, reference=reference)

    def _violations(self, codes: list[int | None], left: list[str], *, is_over: bool, reference: Run) -> list[str]:
        logs = ", ".join(str(path) for path in sorted(self._folder.glob("h?.log")))
        found = [] if is_over else [f"did not end within {LIMIT_SECONDS:.0f} s after the last fault"]
        if any(codes):
            found.append(f"the supervisors ended with {codes}")
        found += [f"left running: {line}" for line in left] if is_over else []
        found += [f"checkpoint {name} is not whole" for name in self._run.torn()]
        if is_over:
            found += judge.run_violations(self._run, reference=reference, is_exact=False, num_steps=HOST_STEPS)
        return [f"{problem}  [{logs}]" for problem in found]

    def _supervise(self, host: Host) -> None:
        strategy, ranks = self._chain.attempts[0].place.strategy, self._chain.attempts[0].place.ranks // 2
        words = [
            *("-m", "finetune", "launch", "torchrun", "--supervise", "--config", str(self._job)),
            *("--accelerate", f"accelerate_configs/{strategy}.yaml", "--nodes", "1:2"),
            *("--gpus-per-node", str(ranks), "--name", host.name, "--interface", "eth0"),
            *("--lost-after", str(LOST_AFTER_SECONDS), "--join", "60", "--stop", "20"),
        ]
        places = (f"run.folder={self._run.folder}", f"data.cache_folder={self._folder / 'cache'}")
        for change in (*places, *host_overrides()):
            words += ["--set", change]
        host.begin(*words, log=self._folder / f"{host.name}.log")

    def _strike(self, fault: Fault) -> None:
        """Do what the fault says, and wait until the run has got over it."""
        if self._has_ended():
            return
        self.struck.append(str(fault))
        began = time.monotonic()
        host = self._hosts.get(fault.target)
        if fault.kind == "kill":
            self._kill_rank(int(fault.target.removeprefix("rank ")))
        elif host is not None and fault.kind == "drop packets":
            network.drop_packets(host, seconds=DROP_SECONDS)
        elif host is not None:
            self._lose(host, is_dead=fault.kind == "lose host")
        self.notes.append(f"{fault}: {time.monotonic() - began:.1f} s, then on {', '.join(self._members())}")

    def _lose(self, host: Host, *, is_dead: bool) -> None:
        """Take the host or its link away until one of the two goes on alone, then give it back."""
        if is_dead:
            host.kill()
        else:
            network.cut(host)
        self._until(lambda: len(self._members()) == 1 and self._run.status().get("state") == "running")
        network.join(host)
        if is_dead:
            self._supervise(host)
        self._until(lambda: len(self._members()) == 2 and self._run.status().get("state") == "running")

    def _kill_rank(self, rank: int) -> None:
        number = self._attempt().get("number")
        peers = self._run.status().get("ranks", [])
        for peer in peers[rank : rank + 1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer["pid"], signal.SIGKILL)
        self._until(lambda: self._attempt().get("number") != number)

    def _attempt(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self._run.folder / ATTEMPT).read_text()))
        return {}

    def _members(self) -> list[str]:
        hosts = self._attempt().get("hosts")
        return sorted(hosts) if isinstance(hosts, list) else []

    def _until(self, is_so: Callable[[], bool]) -> bool:
        return wait_until(is_so, has_ended=self._has_ended, timeout_seconds=LIMIT_SECONDS)

    def _has_ended(self) -> bool:
        programs = [program for host in self._hosts.values() for program in host.programs]
        return bool(programs) and all(program.poll() is not None for program in programs)
