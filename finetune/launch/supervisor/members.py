"""The heartbeats of supervisors, and pure decisions on the hosts of the next attempt.

Clocks of hosts differ, so no time is compared between them: a host is alive as long as its counter grows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

IDLE, RUNNING, FAILED, ENDED = "idle", "running", "failed", "ended"
"""States of a host: its agent is not started, runs, has failed, or has ended for good."""


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a host."""

    name: str
    address: str
    port: int  # of its supervisor, to which others connect to check that they reach it
    main_port: int  # of the rendezvous if this is the main host
    count: int  # grows with every beat
    state: str = IDLE
    attempt: int = 0  # to which the state belongs; if idle, the attempt for which it is ready
    reaches: tuple[str, ...] = ()  # names of hosts that it could connect to
    is_leaving: bool = False  # it received a stop request, or its machine is preempted
    session: str = ""  # of its supervisor; a restart begins a new one


@dataclass(frozen=True)
class Attempt:
    """One launch of the run: on these hosts, in this order; the first one is the main host."""

    number: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int
    reason: str
    num_failures: int = 0  # attempts in a row before this one that failed without progress
    step: int = 0  # of the newest checkpoint when it began
    exit_code: int | None = None  # of every supervisor, once the run is over
    sessions: tuple[str, ...] = ()  # of the participating supervisors, in the order of the hosts


@dataclass(frozen=True)
class Limits:
    """Limits on the number of hosts and of failed attempts in a row."""

    least: int
    most: int
    max_failures: int = 3


@dataclass(frozen=True)
class View:
    """The state of all hosts as one supervisor sees it."""

    alive: Mapping[str, Beat]
    attempt: Attempt | None
    is_patient: bool  # still waiting for more hosts
    is_overdue: bool = False  # it failed on one host long ago, and others still run it
    checkpoint_step: int = 0
    user_mistake: str | None = None
    last_number: int = 0  # of all attempts, including earlier launches


def is_current(attempt: Attempt, alive: Mapping[str, Beat]) -> bool:
    """Return whether a supervisor of the attempt, or one that follows this run's attempts, is alive.

    Otherwise the attempt belongs to an earlier launch, even if supervisors that started later are alive.
    """
    return any(
        beat.session in attempt.sessions or (beat.attempt > 0 and beat.attempt >= attempt.number - 1)
        for beat in alive.values()
    )


def can_save(attempt: Attempt, alive: Mapping[str, Beat]) -> bool:
    """Return whether the ranks of an attempt can still save: all its hosts are alive and reach one another.

    A save needs all ranks: otherwise ranks that are asked to stop would wait for lost ones.
    """
    beats = {name: alive[name] for name in attempt.hosts if name in alive}
    if tuple(beat.session for beat in beats.values()) != attempt.sessions:
        return False
    if any(beat.state == FAILED and beat.attempt == attempt.number for beat in beats.values()):
        return False
    return len(connected_hosts(beats, first=attempt.hosts[0])) == len(attempt.hosts)


def may_start(attempt: Attempt, alive: Mapping[str, Beat]) -> bool:
    """Return whether the attempt may start: its hosts are ready, and no other host runs ranks of an earlier one."""
    beats = [alive.get(name) for name in attempt.hosts]
    if any(beat is None or beat.attempt != attempt.number for beat in beats):
        return False
    return not any(beat.state == RUNNING and beat.attempt < attempt.number for beat in alive.values())


def find_leader(view: View) -> str | None:
    """Return the leader: the first host of the attempt that is alive, else the first by name."""
    order = view.attempt.hosts if view.attempt is not None else ()
    staying = {name for name, beat in view.alive.items() if not beat.is_leaving}
    candidates = [name for name in order if name in staying] + sorted(staying)
    return candidates[0] if candidates else None


def connected_hosts(beats: Mapping[str, Beat], *, first: str, preferred: Collection[str] = ()) -> tuple[str, ...]:
    """Return the largest group of hosts that reach one another both ways.

    Ties are broken by the number of preferred hosts, then in favor of the group with `first`.
    """
    starts = sorted(beats, key=lambda name: (name != first, name))
    groups = [_group_around(start, beats, preferred) for start in starts]
    return max(groups, key=lambda group: (len(group), len(set(group) & set(preferred))), default=())


def next_attempt(view: View, limits: Limits, *, me: str) -> Attempt | None:
    """Return the attempt that the leader `me` begins now, or None if no change is needed.

    An attempt begins when enough hosts are alive; when one of its hosts is lost, leaves, cannot be reached or was
    restarted; when a host joins; and when it has failed on all remaining hosts.
    """
    staying = {name: beat for name, beat in view.alive.items() if not beat.is_leaving}
    attempt = view.attempt
    group = connected_hosts(staying, first=me, preferred=attempt.hosts if attempt is not None else ())
    if attempt is None:
        return _first_attempt(view, limits, group)
    if attempt.exit_code is not None:
        return None
    ended = _ending(view, limits, attempt)
    if ended is not None:
        return ended
    staying_on = [name for name in attempt.hosts if name in group]
    hosts = tuple(staying_on + [name for name in group if name not in staying_on])[: limits.most]
    if len(hosts) < limits.least:
        return None
    if reason := _change(view, attempt, hosts):
        return _begin(view, hosts, reason)
    if _all_failed(view, attempt):
        return _begin(view, hosts, "the last attempt failed", num_failures=_failures(view, attempt))
    return None


def _change(view: View, attempt: Attempt, hosts: Sequence[str]) -> str:
    """Return how these hosts differ from the attempt's; empty if they do not."""
    sessions = dict(zip(attempt.hosts, attempt.sessions, strict=True))
    changes = [f"{name} {_why_missing(view.alive.get(name))}" for name in sorted(set(attempt.hosts) - set(hosts))]
    for name in sorted(hosts):
        if name not in sessions:
            changes.append(f"{name} joined")
        elif view.alive[name].session != sessions[name]:
            changes.append(f"{name} was restarted")
    return ", ".join(changes)


def _why_missing(beat: Beat | None) -> str:
    if beat is None:
        return "is lost"
    return "leaves" if beat.is_leaving else "cannot be reached"


def _group_around(start: str, beats: Mapping[str, Beat], preferred: Collection[str]) -> tuple[str, ...]:
    group = [start]
    for name in sorted(beats, key=lambda other: (other not in beats[start].reaches, other not in preferred, other)):
        if name != start and all(name in beats[other].reaches and other in beats[name].reaches for other in group):
            group.append(name)
    return tuple(group)


def _first_attempt(view: View, limits: Limits, group: Sequence[str]) -> Attempt | None:
    if len(group) < limits.least or (len(group) < limits.most and view.is_patient):
        return None
    return _begin(view, tuple(group)[: limits.most], "starts")


def _begin(view: View, hosts: tuple[str, ...], reason: str, *, num_failures: int = 0) -> Attempt:
    return Attempt(
        number=view.last_number + 1,
        hosts=hosts,
        addresses=tuple(view.alive[name].address for name in hosts),
        port=view.alive[hosts[0]].main_port,
        reason=reason,
        num_failures=num_failures,
        step=view.checkpoint_step,
        sessions=tuple(view.alive[name].session for name in hosts),
    )


def _ending(view: View, limits: Limits, attempt: Attempt) -> Attempt | None:
    """Return the end of the run: success, an error that only the user can fix, or too many failures."""
    beats = [view.alive[name] for name in attempt.hosts if name in view.alive]
    states = {beat.state for beat in beats if beat.attempt == attempt.number}
    if ENDED in states and states <= {ENDED, FAILED}:
        return _end(view, attempt, 0, "the run has ended")
    if not _all_failed(view, attempt):
        return None
    if view.user_mistake is not None:
        return _end(view, attempt, 2, view.user_mistake)
    if _failures(view, attempt) >= limits.max_failures:
        return _end(view, attempt, 1, f"{limits.max_failures} attempts failed without progress")
    return None


def _end(view: View, attempt: Attempt, code: int, reason: str) -> Attempt:
    return replace(attempt, number=view.last_number + 1, reason=reason, num_failures=0, exit_code=code)


def _failures(view: View, attempt: Attempt) -> int:
    return attempt.num_failures + 1 if view.checkpoint_step <= attempt.step else 0


def _all_failed(view: View, attempt: Attempt) -> bool:
    """Return whether the attempt failed on all its hosts, or on one and the others are overdue."""
    beats = [view.alive.get(name) for name in attempt.hosts]
    failed = [beat is not None and beat.state == FAILED and beat.attempt == attempt.number for beat in beats]
    return all(failed) or (any(failed) and view.is_overdue)
