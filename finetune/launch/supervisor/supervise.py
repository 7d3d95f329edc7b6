"""The supervisor of one host: it writes its heartbeat, follows the leader's attempts, and leads if it is first."""

import errno
import json
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from finetune.launch.supervisor.agent import Agent, Job, launch_command, network_environment
from finetune.launch.supervisor.members import (
    ENDED,
    FAILED,
    IDLE,
    RUNNING,
    Attempt,
    Beat,
    Limits,
    View,
    can_save,
    find_leader,
    is_current,
    may_start,
    next_attempt,
)
from finetune.launch.supervisor.network import CONNECT_SECONDS, Listener, Reachability, can_connect, free_port
from finetune.launch.supervisor.shared_folder import NameCheck, SharedFolder

STOPPED = 143
"""Exit code after SIGTERM."""


@dataclass(frozen=True)
class Timing:
    """Intervals and time limits, in seconds."""

    beat: float = 1.0
    lost_after: float = 30.0  # without a beat, or without a connection
    join: float = 60.0  # wait for more than the minimum number of hosts, at the first start


@dataclass(frozen=True)
class RunAccess:
    """Callbacks that keep two attempts from writing to one run, and report that the cloud reclaims this machine."""

    is_locked: Callable[[], bool]  # a process writes to the run folder
    mark_attempt: Callable[
        [int], Mapping[str, str]
    ]  # stops writes of older ranks; returns the environment of the newer ones
    is_reclaimed: Callable[[], bool] = lambda: False  # the machine is about to be preempted


class Ranks(Protocol):
    """The launcher of this host's ranks, as `Agent` is one."""

    def exit_code(self) -> int | None:
        """Return how it ended; None while it runs."""

    def request_stop(self) -> None:
        """Ask the ranks to save and end."""

    def kill(self) -> None:
        """End it and its ranks now."""


@dataclass(frozen=True)
class SystemCalls:
    """The clock, the launcher and the connections of a supervisor, which tests replace."""

    clock: Callable[[], float] = time.monotonic
    launch: Callable[[Sequence[str], Mapping[str, str]], Ranks] = Agent
    connect: Callable[[Iterable[tuple[str, int]]], set[tuple[str, int]]] = can_connect


@dataclass(frozen=True)
class HostSettings:
    """A host, the run folder and the folder that the supervisors share."""

    name: str
    address: str  # IPv4
    interface: str  # that has it
    run_folder: Path
    shared_folder: Path


def supervise(
    job: Job, limits: Limits, *, host: HostSettings, access: RunAccess, timing: Timing, log: Callable[[str], None]
) -> int:
    """Run the job on this host and all available others to its end; return the exit code.

    SIGTERM and SIGINT make this host leave: its ranks save, and the run continues on the others. Raises UserError
    where another host has the same name.
    """
    supervisor = Supervisor(job, limits, host=host, access=access, timing=timing, log=log)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.leave())
    try:
        while (code := supervisor.tick()) is None:
            time.sleep(timing.beat)
        return code
    finally:
        supervisor.close()


class Supervisor:
    """The state of one host's supervisor; `tick` is called about once a second."""

    def __init__(
        self,
        job: Job,
        limits: Limits,
        *,
        host: HostSettings,
        access: RunAccess,
        timing: Timing,
        log: Callable[[str], None],
        system: SystemCalls = SystemCalls(),
    ) -> None:
        self._clock, self._launch = system.clock, system.launch
        self._job, self._limits, self._timing, self._access = job, limits, timing, access
        self._run_folder, self._interface = host.run_folder, host.interface
        self._print = log
        self._shared = SharedFolder(host.shared_folder, lost_after_seconds=timing.lost_after, clock=system.clock)
        self._listener = Listener()
        self._reachability = Reachability(
            lost_after_seconds=timing.lost_after, clock=system.clock, connect=system.connect
        )
        session = uuid.uuid4().hex
        self._me = Beat(host.name, host.address, self._listener.port, free_port(), count=0, session=session)
        self._name_check = NameCheck(self._shared, self._me)
        self._agent: Ranks | None = None
        self._running: Attempt | None = None  # whose ranks the agent has started
        self._stop_at: float | None = None  # when an agent that was asked to stop is killed
        self._started = self._checked_at = self._clock()
        self._resumed_at: float | None = None  # other hosts may have joined in the meantime
        self._was_away = False  # long enough that the other hosts may have continued without this one
        self._waits_for_lock = False
        self._leaves_since: float | None = None
        self._failed_since: float | None = None  # when a host of the attempt was first seen to have failed
        self._log(f"{host.address} on {host.interface}; waiting for {limits.least} to {limits.most} hosts")

    def _log(self, line: str) -> None:
        self._print(f"supervisor {self._me.name}: {line}")

    def leave(self) -> None:
        """Leave the run with this host."""
        self._me = replace(self._me, is_leaving=True)

    def close(self) -> None:
        """End this host's remaining ranks, and remove its heartbeat."""
        if self._agent is not None:
            self._agent.kill()
        self._listener.close()
        with suppress(OSError):
            self._shared.remove_beat(self._me)

    def tick(self) -> int | None:
        """Write the heartbeat, lead if this host is first, and follow the attempt; return the exit code at the end."""
        self._listener.answer()
        self._watch_agent()
        if self._access.is_reclaimed() and not self._me.is_leaving:
            self._log("the cloud is reclaiming this machine")
            self.leave()
        try:
            if not self._name_check.is_free():
                return None
            view = self._observe()
        except OSError as error:
            return self._without_folder(error)
        if self._me.is_leaving:
            return self._leave_attempt(view)
        return self._follow(view, self._lead(view))

    def _observe(self) -> View:
        """Write the heartbeat and return the state of all hosts; raises OSError without the shared folder."""
        if self._me.attempt > self._shared.last_number():  # an empty mount point, perhaps
            raise OSError(errno.ESTALE, "the attempts are no longer in the shared folder")
        self._me = replace(self._me, count=self._me.count + 1)
        self._shared.write_beat(self._me)
        self._forgive_pause()
        alive = self._shared.alive()
        others = {name: (beat.address, beat.port) for name, beat in alive.items() if name != self._me.name}
        self._me = replace(self._me, reaches=self._reachability.update(others))
        alive[self._me.name] = self._me
        attempt = self._shared.read_attempt()
        if attempt is not None and not is_current(attempt, alive):
            attempt = None
        status = read_run_status(self._run_folder, attempt)
        return View(
            alive=alive,
            attempt=attempt,
            is_patient=self._clock() - self._started < self._timing.join,
            is_overdue=self._is_overdue(alive, attempt),
            checkpoint_step=status.checkpoint_step,
            user_mistake=status.user_mistake,
            last_number=self._shared.last_number(),
        )

    def _forgive_pause(self) -> None:
        """Extend the deadlines of the others by the time in which this host was suspended or lost the folder."""
        now = self._clock()
        pause, self._checked_at = now - self._checked_at, now
        excess = max(0.0, pause - self._timing.beat - CONNECT_SECONDS)
        self._shared.skip(excess)
        self._reachability.skip(excess)
        self._was_away = excess > self._timing.lost_after
        if self._was_away:
            self._resumed_at = now
            self._log(f"could not check the other hosts for {pause:.0f} s")

    def _lead(self, view: View) -> Attempt | None:
        """Begin an attempt if this host leads and one is due; return the newest."""
        if find_leader(view) != self._me.name or not self._knows_hosts(view):
            return view.attempt
        begun = next_attempt(view, self._limits, me=self._me.name)
        if begun is None:
            if view.attempt is not None:
                self._shared.publish(view.attempt)
            return view.attempt
        if not self._shared.write_attempt(begun):
            return None  # another host was first: its attempt is read at the next tick
        self._failed_since = None
        return begun

    def _knows_hosts(self, view: View) -> bool:
        """Return whether this host has been awake long enough to know the other hosts."""
        if len(view.alive) >= self._limits.most or (self._resumed_at is None and self._me.attempt > 0):
            return True
        return self._clock() - (self._resumed_at or self._started) >= self._timing.lost_after

    def _is_overdue(self, alive: dict[str, Beat], attempt: Attempt | None) -> bool:
        number = attempt.number if attempt is not None else 0
        if not any(beat.state == FAILED and beat.attempt == number for beat in alive.values()):
            self._failed_since = None
            return False
        self._failed_since = self._failed_since or self._clock()
        return self._clock() - self._failed_since > 2 * self._timing.lost_after

    def _follow(self, view: View, attempt: Attempt | None) -> int | None:
        if attempt is None:
            return None
        if attempt.number != self._me.attempt:
            return self._change_to(attempt, view)
        is_here = self._me.session in attempt.sessions and self._me.state == IDLE
        if is_here and attempt.exit_code is None and may_start(attempt, view.alive):
            self._start(attempt)
        return None

    def _change_to(self, attempt: Attempt, view: View) -> int | None:
        """Stop the running ranks; then get ready for the attempt, or return the exit code at the end of the run."""
        if self._is_stopping(saves=not self._was_away and self._can_save(view)):
            return None
        if attempt.exit_code is not None:
            self._log(attempt.reason)
            return attempt.exit_code
        if attempt.hosts[0] == self._me.name and self._access.is_locked():
            if not self._waits_for_lock:
                self._log(f"attempt {attempt.number} waits: a process still writes to {self._run_folder}")
            self._waits_for_lock = True
            return None
        self._waits_for_lock = False
        is_spare = self._me.name not in attempt.hosts
        more = "; this host is a spare" if is_spare else ""
        self._log(f"attempt {attempt.number} on {', '.join(attempt.hosts)}: {attempt.reason}{more}")
        self._me = replace(self._me, state=IDLE, attempt=attempt.number)
        return None

    def _can_save(self, view: View) -> bool:
        return self._running is not None and can_save(self._running, view.alive)

    def _is_stopping(self, *, saves: bool) -> bool:
        """Stop the agent, if there is one, and return whether it still runs."""
        if self._agent is None:
            return False
        if self._stop_at is None and saves:
            self._agent.request_stop()
            self._stop_at = self._clock() + self._job.stop_seconds
        elif self._stop_at is None or self._clock() > self._stop_at:
            self._stop_at = self._stop_at or self._clock()
            self._log("killing its ranks, which can no longer save")
            self._agent.kill()
        return True

    def _start(self, attempt: Attempt) -> None:
        command = launch_command(self._job, attempt, rank=attempt.hosts.index(self._me.name))
        network = network_environment(self._interface, stop_seconds=self._job.stop_seconds)
        mark = self._access.mark_attempt(attempt.number)
        self._agent, self._running = self._launch(command, {**network, **mark}), attempt
        self._me = replace(self._me, state=RUNNING)

    def _watch_agent(self) -> None:
        """Record how the agent has ended; after a stop request it has neither failed nor ended the run."""
        if self._agent is None or (code := self._agent.exit_code()) is None:
            return
        was_stopped = self._stop_at is not None
        self._agent, self._running, self._stop_at = None, None, None
        state = IDLE if was_stopped else ENDED if code == 0 else FAILED
        if state == FAILED:
            self._log(f"its ranks ended with exit code {code}")
        self._me = replace(self._me, state=state, main_port=free_port())

    def _leave_attempt(self, view: View) -> int | None:
        self._leaves_since = self._leaves_since or self._clock()
        is_seen = self._clock() - self._leaves_since > 2 * self._timing.beat  # by the others
        if self._is_stopping(saves=self._can_save(view)) or not is_seen:
            return None
        self._log("left")
        return STOPPED

    def _without_folder(self, error: OSError) -> int | None:
        """Kill the ranks if the folder stays unavailable: other hosts may have begun another attempt."""
        if self._me.is_leaving and self._agent is None:
            return STOPPED
        if self._clock() - self._checked_at > self._timing.lost_after and self._agent is not None:
            self._log(f"killing its ranks: the shared folder is unavailable ({error.strerror or error})")
            self._agent.kill()
        return None


_USER_MISTAKE = 2


@dataclass(frozen=True)
class RunStatus:
    """The newest checkpoint of the run, and an error that only the user can fix."""

    checkpoint_step: int = 0
    user_mistake: str | None = None


def read_run_status(run_folder: Path, attempt: Attempt | None) -> RunStatus:
    """Return the status, with an error only of this attempt; the defaults without a readable status file."""
    try:
        facts = json.loads((run_folder / "status.json").read_text(encoding="utf-8"))
        return RunStatus(_newest_step(run_folder), _mistake(facts, attempt))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunStatus(_newest_step(run_folder))


def _newest_step(run_folder: Path) -> int:
    steps = [path.name.removeprefix("step-") for path in run_folder.glob("checkpoints/step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _mistake(facts: dict[str, Any], attempt: Attempt | None) -> str | None:
    if attempt is None or facts["exit_code"] != _USER_MISTAKE or not facts["error"]:
        return None
    is_of_attempt = len(attempt.hosts) == 1 or facts["launch"].startswith(f"{attempt.addresses[0]}:{attempt.port}:")
    return str(facts["error"]["message"]) if is_of_attempt else None
