"""The supervisor of one host: it beats, follows the attempt that the leader has begun, and leads where it is first."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

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
    find_leader,
    next_attempt,
)
from finetune.launch.supervisor.network import Listener, Reachability, free_port
from finetune.launch.supervisor.run_status import read_run_status
from finetune.launch.supervisor.shared_folder import SharedFolder

STOPPED = 143
"""Exit code after SIGTERM."""


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds."""

    beat: float = 1.0
    lost_after: float = 30.0  # without a beat, or without a connection
    join: float = 60.0  # for more hosts than the least, at the first start


def supervise(
    job: Job,
    limits: Limits,
    *,
    name: str,
    address: tuple[str, str],
    run_folder: Path,
    shared_folder: Path,
    timing: Timing,
    log: Callable[[str], None],
) -> int:
    """Run the job on this host and whichever others are there, to its end; return the exit code.

    `address` is this host's IPv4 address and the interface that has it. SIGTERM and SIGINT make this host leave: its
    ranks save, and the run continues on the others.
    """
    supervisor = Supervisor(
        job, limits, name=name, address=address, run_folder=run_folder, shared=shared_folder, timing=timing, log=log
    )
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
        name: str,
        address: tuple[str, str],
        run_folder: Path,
        shared: Path,
        timing: Timing,
        log: Callable[[str], None],
    ) -> None:
        self._job, self._limits, self._timing, self._log = job, limits, timing, log
        self._run_folder = run_folder
        self._interface = address[1]
        self._shared = SharedFolder(shared, lost_after_seconds=timing.lost_after)
        self._listener = Listener()
        self._reachability = Reachability(lost_after_seconds=timing.lost_after)
        self._me = Beat(name, address[0], self._listener.port, free_port(), count=0)
        self._agent: Agent | None = None
        self._stop_at: float | None = None  # when an agent that was asked to stop is killed
        self._started = self._folder_seen = time.monotonic()
        self._failed_since: float | None = None  # when a host of the attempt was first seen to have failed
        self._found = self._shared.read_attempt()  # of an earlier launch, unless its hosts turn out to be alive

    def leave(self) -> None:
        """Have this host leave the run."""
        self._me = replace(self._me, is_leaving=True)

    def close(self) -> None:
        """End this host's ranks, if any are left, and its beat."""
        if self._agent is not None:
            self._agent.kill()
        self._listener.close()
        with suppress(OSError):
            self._shared.remove_beat(self._me.name)

    def tick(self) -> int | None:
        """Beat, lead where it is this host's turn, and follow the attempt; return the exit code once all is over."""
        self._listener.answer()
        self._watch_agent()
        try:
            view = self._look()
        except OSError as error:
            return self._without_folder(error)
        self._folder_seen = time.monotonic()
        if self._me.is_leaving:
            return self._leave_attempt()
        attempt = view.attempt
        if find_leader(view) == self._me.name and self._has_looked(view):
            begun = next_attempt(view, self._limits, me=self._me.name)
            if begun is not None:
                self._shared.write_attempt(begun)
                self._failed_since, attempt = None, begun
        return self._follow(view, attempt)

    def _look(self) -> View:
        """Beat, and return what there is to see; raises OSError where the shared folder is not there."""
        self._me = replace(self._me, count=self._me.count + 1)
        self._shared.write_beat(self._me)
        alive = self._shared.alive()
        others = {name: (beat.address, beat.port) for name, beat in alive.items() if name != self._me.name}
        self._me = replace(self._me, reaches=self._reachability.update(others))
        alive[self._me.name] = self._me
        attempt = self._current_attempt(alive)
        status = read_run_status(self._run_folder, attempt)
        return View(
            alive=alive,
            attempt=attempt,
            is_patient=time.monotonic() - self._started < self._timing.join,
            is_overdue=self._is_overdue(alive, attempt),
            checkpoint_step=status.checkpoint_step,
            user_mistake=status.user_mistake,
        )

    def _current_attempt(self, alive: dict[str, Beat]) -> Attempt | None:
        """Return the attempt; one that lay here at the start counts only while another of its hosts is alive."""
        attempt = self._shared.read_attempt()
        if attempt is None or attempt != self._found:
            self._found = None
            return attempt
        if any(name in alive for name in attempt.hosts if name != self._me.name) and attempt.exit_code is None:
            return attempt
        if not self._is_new():
            self._shared.forget_attempt(attempt)
        return None

    def _is_new(self) -> bool:
        return time.monotonic() - self._started < self._timing.lost_after

    def _has_looked(self, view: View) -> bool:
        """Tell whether this host has looked long enough to know who else is there."""
        return not self._is_new() or len(view.alive) >= self._limits.most or self._me.attempt > 0

    def _is_overdue(self, alive: dict[str, Beat], attempt: Attempt | None) -> bool:
        number = attempt.number if attempt is not None else 0
        if not any(beat.state == FAILED and beat.attempt == number for beat in alive.values()):
            self._failed_since = None
            return False
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since > 2 * self._timing.lost_after

    def _follow(self, view: View, attempt: Attempt | None) -> int | None:
        if attempt is None:
            return None
        if attempt.number != self._me.attempt:
            return self._change_to(attempt)
        if self._me.state == IDLE and attempt.exit_code is None and self._is_everybody_ready(view, attempt):
            self._start(attempt)
        return None

    def _change_to(self, attempt: Attempt) -> int | None:
        """Stop what runs; then be ready for the attempt, or end where it is the end of the run."""
        if self._is_stopping():
            return None
        if attempt.exit_code is not None:
            self._log(f"supervisor {self._me.name}: {attempt.reason}")
            return attempt.exit_code
        hosts = ", ".join(attempt.hosts)
        self._log(f"supervisor {self._me.name}: attempt {attempt.number} on {hosts}: {attempt.reason}")
        self._me = replace(self._me, state=IDLE, attempt=attempt.number)
        return None

    def _is_stopping(self) -> bool:
        """Stop the agent, if there is one, and tell whether it is still there."""
        if self._agent is None:
            return False
        if self._stop_at is None:
            self._agent.request_stop()
            self._stop_at = time.monotonic() + self._job.stop_seconds
        elif time.monotonic() > self._stop_at:
            self._agent.kill()
        return True

    def _is_everybody_ready(self, view: View, attempt: Attempt) -> bool:
        beats = [view.alive.get(name) for name in attempt.hosts]
        is_here = self._me.name in attempt.hosts
        return is_here and all(beat is not None and beat.attempt == attempt.number for beat in beats)

    def _start(self, attempt: Attempt) -> None:
        command = launch_command(self._job, attempt, rank=attempt.hosts.index(self._me.name))
        self._agent = Agent(
            command, environment=network_environment(self._interface, stop_seconds=self._job.stop_seconds)
        )
        self._me = replace(self._me, state=RUNNING)

    def _watch_agent(self) -> None:
        """Note how the agent has ended; one that was asked to stop has neither failed nor ended the run."""
        if self._agent is None or (code := self._agent.exit_code()) is None:
            return
        was_asked = self._stop_at is not None
        self._agent, self._stop_at = None, None
        state = self._me.state if was_asked else ENDED if code == 0 else FAILED
        self._me = replace(self._me, state=state, main_port=free_port())

    def _leave_attempt(self) -> int | None:
        if self._is_stopping():
            return None
        self._log(f"supervisor {self._me.name}: left")
        return STOPPED

    def _without_folder(self, error: OSError) -> int | None:
        """Stop the ranks where the folder is away for long: other hosts may have begun another attempt."""
        if time.monotonic() - self._folder_seen > self._timing.lost_after and self._agent is not None:
            self._log(f"supervisor {self._me.name}: {os.strerror(error.errno or 0)}; its ranks are ended")
            self._agent.kill()
        return None
