"""Supervisors of several hosts in one process: real files and real decisions; time, network and ranks are made up.

Ranks of an attempt train while all of them run, are awake and reach one another; rank 0 writes a checkpoint now and
then, and may write only if no newer attempt has begun, as `finetune.runtime.supervision.attempt` has it.
"""

import itertools
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finetune.errors import UserError
from finetune.launch.supervisor.agent import Job
from finetune.launch.supervisor.members import Limits
from finetune.launch.supervisor.supervise import HostSettings, RunAccess, Supervisor, SystemCalls, Timing
from finetune.runtime.supervision.attempt import mark_attempt, newer_attempt

JOB = Job(("-m", "finetune"), Path("fsdp2.yaml"), ranks_per_host=1, stop_seconds=20)
TIMING = Timing(beat=1.0, lost_after=6.0, join=10.0)


@dataclass(eq=False)
class FakeRanks:
    """The ranks of one host in one attempt."""

    host: "FakeHost"
    attempt: int
    rank: int
    world: int
    environment: Mapping[str, str]
    code: int | None = None
    is_asked: bool = False
    is_deaf: bool = False  # stopped by a debugger, say: it does nothing and ends only when it is killed

    def exit_code(self) -> int | None:
        return self.code

    def request_stop(self) -> None:
        self.is_asked = True

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code


@dataclass(eq=False)
class FakeHost:
    name: str
    address: str
    supervisor: Supervisor | None = None
    ranks: list[FakeRanks] = field(default_factory=list)
    asleep_until: float = 0.0
    exit_code: int | None = None
    group: int = 0  # hosts of one group reach one another


class Simulation:
    """A cluster at a time of its own; `tick` lets a second pass."""

    def __init__(self, folder: Path, *, num_hosts: int, least: int, seed: int, has_locks: bool) -> None:
        self.chance, self.now, self.steps_wanted = random.Random(seed), 1000.0, 10**9
        self.limits, self.has_locks = Limits(least, num_hosts), has_locks
        self.run, self.shared = folder, folder / "supervisors"
        self.hosts = [FakeHost(f"h{number}", f"10.0.0.{number}") for number in range(num_hosts)]
        self.step, self.written = 0, []  # attempts, in the order in which they wrote
        self.refused: list[int] = []  # attempts whose ranks were not let write
        self.lines: list[str] = []
        (folder / "checkpoints").mkdir(parents=True)

    def start(self, host: FakeHost) -> None:
        settings = HostSettings(host.name, host.address, "eth0", self.run, self.shared)
        access = RunAccess(is_locked=self._is_locked, mark_attempt=lambda number: mark_attempt(self.shared, number))
        system = SystemCalls(
            clock=lambda: self.now,
            launch=lambda command, environment: self._launch(host, command, environment),
            connect=lambda places: self._connect(host, places),
        )
        host.exit_code, host.asleep_until, host.ranks = None, 0.0, []
        host.supervisor = Supervisor(
            JOB, self.limits, host=settings, access=access, timing=TIMING, log=self._log, system=system
        )

    def kill(self, host: FakeHost) -> None:
        """Take the machine away."""
        if host.supervisor is not None:
            host.supervisor._listener.close()
        host.supervisor, host.ranks = None, []

    def tick(self) -> None:
        self.now += 1.0
        trains_first = self.chance.random() < 0.5  # ranks that wake up are quicker than their supervisor
        if trains_first:
            self._train()
        for host in self.chance.sample(self.hosts, len(self.hosts)):
            if host.supervisor is not None and self.now >= host.asleep_until:
                self._tick(host)
        if not trains_first:
            self._train()

    def _tick(self, host: FakeHost) -> None:
        assert host.supervisor is not None
        try:
            host.exit_code = host.supervisor.tick()
        except UserError:
            host.exit_code = 2
        if host.exit_code is not None:
            host.supervisor.close()
            host.supervisor = None

    def _train(self) -> None:
        running = [ranks for host in self.hosts for ranks in host.ranks if ranks.code is None]
        for number in sorted({ranks.attempt for ranks in running}):
            group = [ranks for ranks in running if ranks.attempt == number]
            if self._can_talk(group):
                self._take_step(group)

    def _can_talk(self, group: Sequence[FakeRanks]) -> bool:
        is_awake = all(self.now >= ranks.host.asleep_until and not ranks.is_deaf for ranks in group)
        return is_awake and len(group) == group[0].world and len({ranks.host.group for ranks in group}) == 1

    def _take_step(self, group: Sequence[FakeRanks]) -> None:
        is_stopping, number = any(ranks.is_asked for ranks in group), group[0].attempt
        newer = newer_attempt(group[0].environment)
        if newer is not None:
            self.refused.append(number)
            for ranks in group:
                ranks.code = 1
            return
        self.step += 1
        is_over = self.step >= self.steps_wanted
        if is_stopping or is_over or self.step % 5 == 0:
            self.written.append(number)
            (self.run / "checkpoints" / f"step-{self.step:06d}").mkdir(exist_ok=True)
        for ranks in group if is_stopping or is_over else ():
            ranks.code = 0 if is_over else 143

    def fail(self, host: FakeHost) -> None:
        """One of the host's ranks fails, and so do those of its attempt that it talks to."""
        for number in {ranks.attempt for ranks in host.ranks if ranks.code is None}:
            for other in self.hosts:
                for ranks in other.ranks if other.group == host.group else ():
                    ranks.code = 1 if ranks.attempt == number and ranks.code is None else ranks.code

    def running(self) -> list[FakeRanks]:
        return [ranks for host in self.hosts for ranks in host.ranks if ranks.code is None]

    def hide_folder(self) -> None:
        self.shared.rename(self.run / "away")

    def show_folder(self) -> None:
        if (self.run / "away").exists():
            shutil.rmtree(self.shared, ignore_errors=True)
            (self.run / "away").rename(self.shared)

    def _launch(self, host: FakeHost, command: Sequence[str], environment: Mapping[str, str]) -> FakeRanks:
        options = dict(itertools.pairwise(command))
        rank, world = int(options["--machine_rank"]), int(options["--num_machines"])
        host.ranks.append(FakeRanks(host, int(environment["FINETUNE_ATTEMPT"]), rank, world, environment))
        return host.ranks[-1]

    def _connect(self, host: FakeHost, places: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        there = {other.address for other in self.hosts if other.supervisor is not None and other.group == host.group}
        awake = {other.address for other in self.hosts if self.now >= other.asleep_until}
        return {place for place in places if place[0] in there & awake}

    def _is_locked(self) -> bool:
        return self.has_locks and any(ranks.rank == 0 for ranks in self.running())

    def _log(self, line: str) -> None:
        self.lines.append(f"{self.now:.0f} {line}")
