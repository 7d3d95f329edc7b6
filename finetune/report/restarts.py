"""What restarts have cost, from the events of a run: why the start before ended, steps taken again, time and money."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_STARTS = 100
KILLED = "killed"
FIRST_STEP = "first step"
"""The last phase of a start."""

PLANNED = frozenset(
    {"finished", "early stopping", "time limit", "STOP file", "stop_after_steps", "signal SIGINT", "interrupted"}
)
"""Ends that somebody wanted: they are no interruptions."""


@dataclass
class Restart:
    """One start after the first. Of the time lost, nothing was paid for while no process was there."""

    number: int  # of the start: the first restart is start 2
    reason: str  # why the start before ended
    step: int  # from which it resumed
    last_step: int  # that had been taken by then
    began: float  # unix seconds when its process did; until its first step is over, when training did
    ended: float  # when the start before was seen last
    num_devices: int
    usd_per_device_hour: float | None = None
    startup_seconds: float = 0.0
    steps_redone: int = 0
    redone_seconds: float = 0.0

    @property
    def down_seconds(self) -> float:
        """Return the time in which no process of the run was there."""
        return max(0.0, self.began - self.ended)

    @property
    def lost_seconds(self) -> float:
        """Return the time from the last sign of the start before to the first step that is a new one."""
        return self.down_seconds + self.startup_seconds + self.redone_seconds

    @property
    def device_seconds(self) -> float:
        """Return the time for which devices were paid: start-up and the steps taken again, on all of them."""
        return (self.startup_seconds + self.redone_seconds) * self.num_devices

    @property
    def usd(self) -> float | None:
        """Return what that costs; None without a price."""
        return None if self.usd_per_device_hour is None else self.device_seconds / 3600 * self.usd_per_device_hour

    @property
    def is_interruption(self) -> bool:
        """Return whether nobody wanted the start before to end."""
        return self.reason not in PLANNED


@dataclass
class RestartTotals:
    """The sums over all restarts, also of those that are no longer listed."""

    restarts: int = 0
    interruptions: int = 0
    steps_redone: int = 0
    down_seconds: float = 0.0
    startup_seconds: float = 0.0
    redone_seconds: float = 0.0
    device_seconds: float = 0.0
    usd: float | None = None

    @property
    def lost_seconds(self) -> float:
        """Return the time lost altogether."""
        return self.down_seconds + self.startup_seconds + self.redone_seconds

    def add(self, restart: Restart) -> None:
        """Count a restart."""
        self.restarts += 1
        self.interruptions += restart.is_interruption
        self.steps_redone += restart.steps_redone
        self.down_seconds += restart.down_seconds
        self.startup_seconds += restart.startup_seconds
        self.redone_seconds += restart.redone_seconds
        self.device_seconds += restart.device_seconds
        if restart.usd is not None:
            self.usd = (self.usd or 0.0) + restart.usd


@dataclass
class RestartHistory:
    """Reads events in the order in which they were written; restarts before the last hundred are only summed."""

    recent: list[Restart] = field(default_factory=list)
    price_source: str = ""
    _older: RestartTotals = field(default_factory=RestartTotals)
    _starts: int = 0
    _top: int = 0  # the highest step taken so far
    _seen: float = 0.0  # when the run was seen last
    _reason: str | None = None  # why the running start has ended

    def start(self, event: Mapping[str, Any], *, num_devices: int) -> None:
        """Add a start of the run."""
        self._starts += 1
        step, time = int(event["step"]), _finite(event.get("time"))
        if self._starts > 1:
            self._add_restart(event, step=step, time=time, num_devices=num_devices)
        self._top, self._reason = max(self._top, step), None
        self._see(time)

    def started_up(self, event: Mapping[str, Any]) -> None:
        """Add how long the start took; the event comes after its first step, which counts as a step."""
        self._see(_finite(event.get("time")))
        if self.recent:
            seconds = {name: _finite(value) for name, value in (event.get("seconds") or {}).items()}
            restart = self.recent[-1]
            restart.startup_seconds = sum(seconds.values()) - seconds.get(FIRST_STEP, 0.0)
            restart.began = _finite(event.get("time")) - sum(seconds.values())

    def steps_taken(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add steps of one start."""
        if self.recent and events[0]["step"] <= self.recent[-1].last_step:
            again = [event for event in events if event["step"] <= self.recent[-1].last_step]
            self.recent[-1].steps_redone += len(again)
            self.recent[-1].redone_seconds += sum(_finite(event.get("seconds")) for event in again)
        self._top = max(self._top, events[-1]["step"])
        self._see(_finite(events[-1].get("time")))

    def end(self, event: Mapping[str, Any]) -> None:
        """Add the end of the running start."""
        self._reason = str(event.get("reason"))
        self._see(_finite(event.get("time")))

    def set_price(self, usd_per_device_hour: float, *, source: str) -> None:
        """Count all restarts at this price."""
        self.price_source = source
        for restart in self.recent:
            restart.usd_per_device_hour = usd_per_device_hour
        if self._older.restarts:
            self._older.usd = self._older.device_seconds / 3600 * usd_per_device_hour

    def totals(self) -> RestartTotals:
        """Return the sums."""
        totals = RestartTotals(**vars(self._older))
        for restart in self.recent:
            totals.add(restart)
        return totals

    def _add_restart(self, event: Mapping[str, Any], *, step: int, time: float, num_devices: int) -> None:
        previous = event.get("previous") or {}
        seen, top = previous.get("time"), previous.get("step")
        if isinstance(seen, int | float) and seen <= time:
            self._see(float(seen))
        if isinstance(top, int) and top <= int(event.get("num_steps") or 0):
            self._top = max(self._top, top)  # events are written when they are logged, the status more often
        price = event.get("device_price") or {}
        usd = price.get("usd_per_hour")
        self.price_source = str(price.get("source") or self.price_source)
        reason = self._reason or str(previous.get("reason") or KILLED)
        if len(self.recent) >= MAX_STARTS:
            self._older.add(self.recent.pop(0))
        self.recent.append(
            Restart(
                number=self._starts,
                reason=reason,
                step=step,
                last_step=self._top,
                began=time,
                ended=min(self._seen, time),
                num_devices=num_devices,
                usd_per_device_hour=float(usd) if isinstance(usd, int | float) else None,
            )
        )

    def _see(self, time: float) -> None:
        self._seen = max(self._seen, time)


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
